"""A node of another host that was let in, has no seat, and lies: the job goes on, and people are told once."""

import asyncio
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import WSMsgType, web

from holdfast.config import Settings
from holdfast.controller.access.caller_admission import ANY_NODE, Caller, Right
from holdfast.controller.actions.launch_plan import LaunchPlan
from holdfast.core.agent_state_machine import Post
from holdfast.core.detect.silence import SilenceLimits
from holdfast.model.decider_events import Begin, Ended, Outcome, Progress, Ready, Successor
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_phase import Phase
from holdfast.model.node_errands import Done, LaunchHere, Leave, StopHere
from holdfast.model.observation import Beat, Mark, Strain, StrainKind
from holdfast.model.probe_findings import Finding
from holdfast.model.rank_traces import Arrival, Collective, Flight, Frame, Process, StackRow, Thread, Trace
from holdfast.model.restore_sources import Restore
from holdfast.model.state_copy import Copy
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import FromAgent, Hello, NodeNotice, TraceAnswer, TraceRequest
from holdfast.wire.credentials.node_serials import RecordedSerials
from tests.controller.conftest import Agent, Desk, Open

HELLO = Hello(node="evil", host="h", nproc=1, order=0, generation=0, ready=False)
ALARM = Alarm(kind=Kind.LOSS, at=1.0, suspects=(), reason="so I say", generation=1, not_after=5)
PATIENT = Settings(silence=SilenceLimits(silence_s=60.0))


def port(request: web.Request) -> Caller:
    node = request.query.get("node", "here")
    if request.path != "/agent":
        return Caller(name="Ada", right=Right.ADMIN)
    return Caller(name=node, node=ANY_NODE if node == "here" else node)


async def link(desk: Desk, node: str) -> Agent:
    return Agent(await desk.client.ws_connect(f"/agent?node={node}"), node)


async def says(agent: Agent, *told: FromAgent) -> None:
    for one in told:
        await agent.ws.send_bytes(agent_messages.encode(one))


async def trains(desk: Desk, node: str = "a") -> Agent:
    agent = await link(desk, node)
    await agent.hello()
    await agent.answer(await agent.errand())
    await agent.beat(7)
    await desk.phase(Phase.TRAINING)
    kinds = {Begin, Ready, Outcome, Progress}  # the launch may be answered after the first step is heard of
    await desk.until(lambda: kinds == {type(event) for event in desk.events()}, "an answer to the launch")
    return agent


async def comes_in(desk: Desk) -> Agent:
    evil = await link(desk, "evil")
    await says(evil, HELLO)
    await evil.hear()
    return evil


def changed(value: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(value, **fields)


LIES = [
    ALARM,
    changed(ALARM, kind=Kind.CRASH, code=1),
    changed(ALARM, kind=Kind.CRASH, suspects=("evil",), ranks=(0,)),
    changed(ALARM, suspects=("a",)),
    changed(ALARM, generation=0, stance=Stance.NOTIFY),
    Ended(node="evil", generation=1),
]


async def test_who_has_no_seat_neither_stops_nor_rewinds_the_job_and_is_told_once(desk_of: Open) -> None:
    said: list[str] = []
    async with desk_of(port=port, settings=PATIENT, say=said.append) as desk:
        await trains(desk)
        evil, before = await comes_in(desk), len(desk.events())
        for lie in LIES:
            await evil.post(lie)
        await evil.post(Done(id=99, node="evil", ok=True, stored=10**9))
        await says(evil, Beat(node="evil", generation=1, step=0, at=1.0, stored=10**9))
        await desk.until(lambda: "evil" in desk.controller.registry.beats, "its beat")
        assert desk.events()[before:] == [] and desk.controller.view.phase is Phase.TRAINING
        assert [line for line in said if "evil" in line] == [
            "ignored what evil reported about other nodes or the job, in which it has no seat: a node speaks for itself"
        ]
        assert desk.controller.reached_step == 7 and desk.controller.registry.stored == -1
        await evil.post(changed(ALARM, kind=Kind.HEALTH, generation=0, suspects=("evil",), stance=Stance.NOTIFY))
        await desk.until(lambda: len(desk.events()) == before + 1, "what it says of itself")


async def test_who_has_a_seat_names_no_ranks_of_others(desk_of: Open) -> None:
    async with desk_of(port=port, settings=PATIENT) as desk:
        agent, before = await trains(desk), len(desk.events())
        await agent.post(changed(ALARM, ranks=(0, 1), stance=Stance.NOTIFY))
        await agent.post(changed(ALARM, ranks=(0,), stance=Stance.NOTIFY))
        await desk.until(lambda: len(desk.events()) > before, "an alarm")
        assert [event.ranks for event in desk.events()[before:] if isinstance(event, Alarm)] == [(0,)]


async def test_any_node_that_is_linked_can_be_evicted_and_is_not_heard_afterwards(desk_of: Open) -> None:
    async with desk_of(port=port, settings=PATIENT) as desk:
        await trains(desk)
        evil = await comes_in(desk)
        answer = await desk.client.post("/api/v1/orders", json={"verb": "evict", "node": "evil"})
        assert answer.status == 200, await answer.text()
        assert isinstance(await evil.errand(), Leave)
        await desk.until(lambda: desk.controller.registry.has_left("evil"), "its departure")
        before = len(desk.events())
        health = changed(ALARM, kind=Kind.HEALTH, generation=0, suspects=("evil",), stance=Stance.NOTIFY)
        await evil.post(health)
        await says(evil, changed(HELLO, ready=True))
        await evil.post(health)
        await asyncio.wait_for(heard_acks(evil, 2), 30)
        assert len(desk.events()) == before
        again = await desk.client.post("/api/v1/orders", json={"verb": "evict", "node": "nobody"})
        assert again.status == 400


async def heard_acks(agent: Agent, count: int) -> None:
    while count:
        count -= isinstance(await agent.hear(), agent_messages.Ack)


@pytest.mark.parametrize("claim", [{"epoch": 2}, {"epoch": 1_000_000}, {"generation": 10**9}, {"generation": 2}])
async def test_newer_controllers_and_generations_are_not_believed_of_whoever_was_let_in(
    desk_of: Open, claim: dict[str, int]
) -> None:
    said: list[str] = []
    async with desk_of(port=port, settings=PATIENT, say=said.append) as desk:
        await trains(desk)
        before = len(desk.events())
        for _ in range(2):
            evil = await link(desk, "evil")
            await says(evil, changed(HELLO, **claim))
            closed = await evil.ws.receive(timeout=10)
            assert (closed.type.name, closed.data) == ("CLOSE", 1008)
        assert (desk.controller.epoch, desk.controller.view.generation, len(desk.events())) == (1, 1, before)
        assert sum("refused evil" in line for line in said) == 1


@pytest.mark.parametrize("claim", [{"epoch": 1_000_000}, {"generation": 5000}])
async def test_who_has_a_seat_is_believed_no_more_than_a_journal_can_lose(desk_of: Open, claim: dict[str, int]) -> None:
    async with desk_of(port=port, settings=PATIENT) as desk:
        await trains(desk)
        again = await link(desk, "a")
        await says(again, changed(HELLO, node="a", **claim))
        assert (await again.ws.receive(timeout=10)).data == 1008
        await says(again := await link(desk, "a"), changed(HELLO, node="a", epoch=7, generation=1))
        await again.hear()
        assert desk.controller.epoch == 8


@pytest.mark.parametrize("generation", [3, 5000])
async def test_after_the_loss_of_a_whole_journal_nodes_that_joined_before_are_believed(
    desk_of: Open, generation: int, tmp_path: Path
) -> None:
    """Its mark and the newest plan are lost with it; who joins now is believed no more than before."""
    said: list[str] = []
    async with desk_of(port=port, settings=PATIENT, say=said.append) as desk:
        desk.built.certificates.take_recorded(RecordedSerials({"a": "01", "b": "02"}, 0, tmp_path))
        for name, believed in (("evil", False), ("a", generation < 1000)):
            agent = await link(desk, name)
            await says(agent, changed(HELLO, node=name, epoch=1, generation=generation))
            closed = (await agent.ws.receive(timeout=10)).data == 1008
            assert closed is not believed
        assert (desk.controller.epoch, desk.controller.view.generation) == ((2, 3) if generation == 3 else (1, 0))
        assert sum("refused evil" in line for line in said) == 1
        lost = [event.lost for event in desk.events() if isinstance(event, Successor)]
        assert [one and one.nodes for one in lost] == ([("a", "b")] if generation == 3 else [])


def bounded(kind: msgspec.inspect.Type, at: str, seen: set[type]) -> Iterator[str]:
    """Yield where a number of a message has no bounds."""
    inspect = msgspec.inspect
    match kind:
        case inspect.IntType(ge=low, le=high) | inspect.FloatType(ge=low, le=high) if low is None or high is None:
            yield at
        case inspect.StructType(cls=cls, fields=fields) if cls not in seen:
            seen.add(cls)
            for field in fields:
                yield from bounded(field.type, f"{cls.__name__}.{field.name}", seen)
        case inspect.UnionType(types=types):
            for one in types:
                yield from bounded(one, at, seen)
        case inspect.VarTupleType(item_type=item):
            yield from bounded(item, at, seen)
        case inspect.TupleType(item_types=items):
            for one in items:
                yield from bounded(one, at, seen)
        case inspect.DictType(key_type=key, value_type=value):
            yield from bounded(key, at, seen)
            yield from bounded(value, at, seen)


@pytest.mark.parametrize(
    "body",
    [
        '{"verb":"hold","number":18446744073709551616}',
        '{"verb":"hold","number":9223372036854775807}',
        '{"verb":"hold","code":9223372036854775808}',
        '{"verb":"hold","window_s":1e308}',
        '{"verb":"update","release":{"number":18446744073709551616}}',
    ],
)
async def test_orders_with_absurd_numbers_are_refused_and_leave_no_trace(desk_of: Open, body: str) -> None:
    async with desk_of(port=port, settings=PATIENT) as desk:
        await trains(desk)
        before = len(desk.events())
        answer = await desk.client.post("/api/v1/orders", data=body)
        assert answer.status == 400, await answer.text()
        assert len(desk.events()) == before and desk.controller.view.phase is Phase.TRAINING


def found(finding: Finding) -> Post:
    return Post(seq=1, body=Done(id=1, node="evil", ok=True, findings=(finding,)))


def flight(**rest: Any) -> Flight:
    return Flight(node="evil", rank=0, groups=(changed(Collective(group="0", entered=1, completed=0), **rest),))


HASHES = {"Mark.value", "ReplayResult.marks", "ReplayResult.signed"}  # compared, and nothing is made of them
ALARMS = {"Alarm.at", "Alarm.confidence"}  # which have theirs at the port, since journals have any
LOSS = {"Beat.loss"}  # of a model, which may be anything


def test_every_number_of_a_message_has_bounds() -> None:
    assert set(bounded(msgspec.inspect.type_info(FromAgent), "", set())) == HASHES | ALARMS | LOSS


@pytest.mark.parametrize(
    "told",
    [
        changed(HELLO, nproc=2**63, ready=True),
        changed(HELLO, order=2**63),
        changed(HELLO, host="h" * 5000),
        changed(HELLO, keeper=("h", 2**40)),
        Post(seq=1, body=changed(ALARM, not_after=2**63)),
        Post(seq=1, body=changed(ALARM, at=float("nan"))),
        Beat(node="evil", generation=1, step=2**63, at=1.0),
        Beat(node="evil", generation=1, step=1, at=float("inf")),
        Beat(node="evil", generation=1, step=1, at=1.0, arrivals={0: (Arrival("0", 1, float("nan")),)}),
        Beat(node="evil", generation=1, step=1, at=1.0, arrivals={0: (Arrival("0", 1, 1.0, -1.0),)}),
        TraceAnswer(id=1, trace=Trace(node="evil", at=1e308)),
        TraceAnswer(id=1, trace=Trace(node="evil", at=1.0, took_s=-1.0)),
        TraceAnswer(id=1, trace=Trace(node="evil", at=1.0, flights=(flight(expires_at=float("inf")),))),
        TraceAnswer(id=1, trace=Trace(node="evil", at=1.0, flights=(flight(unbegun_s=float("nan")),))),
        found(Finding(probe="gemm", level=1, ok=True, value=1e308)),
        found(Finding(probe="gemm", level=1, ok=True, samples=(1.0, float("nan")))),
        found(Finding(probe="gemm", level=1, ok=True, took_s=-0.1)),
    ],
)
def test_absurd_numbers_are_no_message(told: FromAgent) -> None:
    with pytest.raises(msgspec.DecodeError):
        agent_messages.decode_from_agent(agent_messages.encode(told))


async def test_long_texts_are_cut_and_sentences_for_the_console_are_few(desk_of: Open) -> None:
    said: list[str] = []
    async with desk_of(port=port, settings=PATIENT, say=said.append) as desk:
        await trains(desk)
        evil = await comes_in(desk)
        await says(evil, *[NodeNotice(node="evil", text="B" * 500_000)] * 40)
        own = changed(ALARM, kind=Kind.HEALTH, generation=0, suspects=("evil",), stance=Stance.NOTIFY)
        stacks = (StackRow(depth=0, frame="F" * 5000, ranks="rank 0", count=1),)
        await evil.post(changed(own, reason="A" * 900_000, evidence=("C" * 5000,) * 20, stacks=stacks))

        def told() -> list[Alarm]:  # a busy host may also have the job stand for a while
            return [event for event in desk.events() if isinstance(event, Alarm) and event.kind is Kind.HEALTH]

        await desk.until(told, "an alarm")
        [alarm] = told()
        assert len(alarm.reason) < 2100 and alarm.reason.endswith("(900,000 characters)")
        assert all(len(line) < 2100 for line in alarm.evidence)
        assert alarm.stacks == (), "only the controller puts stacks into an alarm"
        sentences = [line for line in said if "BBB" in line]
        assert len(sentences) < 40 and sum(map(len, sentences)) < 40 * 2100


async def test_nobody_tells_of_others_ranks_in_traces_hashes_and_strains(desk_of: Open) -> None:
    async with desk_of(port=port, settings=PATIENT) as desk:
        agent = await trains(desk)
        ingest, own = desk.built.ingest, Process(node="a", rank=0, pid=1)
        lies = (Process(node="a", rank=1, pid=1), Process(node="b", rank=0, pid=1))
        trace = Trace(node="a", at=1.0, processes=(own, *lies), flights=(Flight(node="a", rank=1),))
        assert ingest._own_trace("a", trace) == Trace(node="a", at=1.0, processes=(own,))
        strain = Strain(kind=StrainKind.SLOWS, sign="s", nodes=("a", "b"), since=1.0, text="hot")
        beat = Beat(node="a", generation=1, step=8, at=1.0, strains=(strain,))
        assert [s.nodes for s in ingest._believable_beat(beat).strains] == [("a",)]
        mark = Mark(rank=1, step=8, group="g", count=2, part="parameters", value=1)
        await says(agent, agent_messages.HashReport(node="a", generation=1, marks=(mark,)))
        await agent.beat(8)
        await desk.until(lambda: desk.controller.reached_step == 8, "a step")
        assert desk.controller.detectors.replicas.newest_equal_step() == -1


def copy_on(node: str, step: int, **fields: Any) -> Copy:
    return Copy(rank=0, step=step, node=node, layout="l", world=1, whole=True, **fields)


async def test_a_state_is_restored_from_nodes_that_had_seats_whatever_others_claim_to_hold(desk_of: Open) -> None:
    async with desk_of(port=port, settings=PATIENT) as desk:
        agent, evil = await trains(desk), await link(desk, "evil")
        newer = (copy_on("evil", 9, disk=True, generation=1), copy_on("a", 10, disk=True, generation=1))
        await says(evil, changed(HELLO, copies=newer))
        await evil.hear()
        assert desk.controller.registry.copies["evil"] == newer[:1], "what lies on others is theirs to tell"
        await agent.post(changed(ALARM, kind=Kind.CRASH, suspects=("a",), ranks=(0,), code=1, not_after=None))
        stop = await agent.errand()
        assert isinstance(stop, StopHere)
        held = (copy_on("a", 7), copy_on("b", 8))
        await agent.post(Done(id=stop.id, node="a", ok=True, copies=held))
        launch = await agent.errand()
        assert isinstance(launch, LaunchHere) and launch.restore.step == 7
        assert desk.controller.registry.copies["a"] == held[:1]


async def test_news_of_a_lost_generation_is_believed_only_of_nodes_that_were_launched(desk_of: Open) -> None:
    """The journal has lost who had seats in it; what it acknowledges to one of them it holds all the same."""
    said: list[str] = []
    async with desk_of(port=port, settings=PATIENT, say=said.append) as desk:
        await trains(desk)
        agent, evil = await link(desk, "b"), await comes_in(desk)
        lost = LaunchPlan(id=9, restore=Restore(), generation=2, nodes=("a", "b"))
        desk.controller.executor.notes.put_note("plan.json", msgspec.json.encode(lost))
        await says(agent, changed(HELLO, node="b", generation=2))
        assert isinstance(await agent.errand(), StopHere) and desk.controller.registry.orphaned == 2
        before, news = (
            len(desk.events()),
            (Ended(node="b", generation=2), changed(ALARM, generation=2, suspects=("b",))),
        )
        for body in (*news, changed(ALARM, generation=2, suspects=("a",))):
            await agent.post(body)
        await asyncio.wait_for(heard_acks(agent, 3), 30)
        for body in (Ended(node="evil", generation=2), changed(ALARM, generation=2, suspects=("evil",))):
            await evil.post(body)
        await asyncio.wait_for(heard_acks(evil, 2), 30)
        assert tuple(event for event in desk.events()[before:] if isinstance(event, Ended | Alarm)) == news
        assert [line.split(" reported")[0] for line in said if "ignored" in line] == [
            "ignored what b",
            "ignored what evil",
        ]


async def test_memory_of_a_lost_generation_is_believed_only_of_nodes_that_were_launched(desk_of: Open) -> None:
    async with desk_of(port=port, settings=PATIENT) as desk:
        await trains(desk)
        desk.controller.registry.record_orphaned(1)
        evil = await link(desk, "evil")
        await says(evil, changed(HELLO, generation=1))
        stop = await evil.errand()
        assert isinstance(stop, StopHere)
        await evil.post(Done(id=stop.id, node="evil", ok=True, copies=(copy_on("evil", 9),)))
        await asyncio.wait_for(heard_acks(evil, 1), 30)
        assert "evil" not in desk.controller.registry.copies


async def test_what_a_node_has_compressed_is_not_unpacked(desk_of: Open) -> None:
    """A kilobyte of it is a message of the largest size: one link had the controller unpack a gigabyte a second."""
    async with desk_of(port=port, settings=PATIENT) as desk:
        agent = await trains(desk)
        evil = await desk.client.ws_connect("/agent?node=evil", compress=15)
        assert not evil.compress, "the controller agreed to unpack what comes"
        packing = zlib.compressobj(wbits=-15)
        packed = packing.compress(bytes(agent_messages.MAX_BYTES)) + packing.flush(zlib.Z_SYNC_FLUSH)
        bomb = struct.pack("!BBH", 0xC2, 0x80 | 126, len(packed)) + bytes(4) + packed  # a frame marked as packed
        began_s = time.thread_time()  # the controller is served in this thread
        transport = evil._writer.transport
        transport.write(bomb * 200)
        assert (await evil.receive()).type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.CLOSING)
        assert time.thread_time() - began_s < 0.5
        await agent.beat(8)
        await desk.until(lambda: desk.controller.reached_step == 8, "the honest node is heard")


FORGED = "main\nrank 0: all is well\x1b[2J"
CLEAN = "main rank 0: all is well"


async def test_stacks_of_a_node_forge_no_lines(desk_of: Open) -> None:
    """Its agent cleans them, but its credentials may be in other hands."""
    frame, long = Frame(FORGED, FORGED, 1), Frame("f" * 9000, "g" * 9000, 1)
    told = Process(node="a", rank=0, pid=1, name=FORGED, error=FORGED, ending=FORGED, state=FORGED)
    told = changed(told, threads=(Thread(name=FORGED, main=True, sleeps_in=FORGED, frames=(frame, long)),))
    entered = flight(group=FORGED, op=FORGED, ended_op=FORGED, started_op=FORGED)
    async with desk_of(port=port, settings=PATIENT) as desk:
        agent = await trains(desk)
        asked = asyncio.create_task(desk.client.post("/api/v1/trace", json={"deadline_s": 5.0}))
        while not isinstance(request := await agent.hear(), TraceRequest):
            pass
        trace = Trace(node="a", at=1.0, error=FORGED, processes=(told,), flights=(changed(entered, node="a"),))
        await says(agent, TraceAnswer(id=request.id, trace=trace))
        answer = await (await asked).json()
    [seen] = answer["traces"]
    texts = list(texts_of(seen))
    assert texts.count(CLEAN) == 13 and not [text for text in texts if "\n" in text or "\x1b" in text]
    assert max(map(len, texts)) == 200


def texts_of(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    for inner in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from texts_of(inner)
