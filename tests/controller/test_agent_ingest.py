"""What agents say and hear: welcomes, acknowledgements, errands; and what the decider is told of it."""

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import web

from holdfast.config import Settings
from holdfast.controller.access.caller_admission import ANY_NODE, Caller
from holdfast.core.detect.replica import ReplicaLimits
from holdfast.core.detect.silence import SilenceLimits
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.copy_aim import Aim
from holdfast.model.decider_events import Ended, Progress, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.node_errands import Done, LaunchHere, Leave, StopHere
from holdfast.model.observation import Beat, Mark
from holdfast.model.stored_checkpoint_report import MissedCheckpoint
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import (
    Ack,
    AimMessage,
    ErrandMessage,
    HashReport,
    ScriptImports,
    Welcome,
)
from tests.controller.conftest import HEADERS, Agent, Desk, Open

QUICK = Settings(silence=SilenceLimits(beat_s=0.1, silence_s=1.5), recovery=Limits(stop_s=0.5, stop_grace_s=0.0))


async def test_from_hello_to_the_end(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.link("a")
        await agent.hello(ready=False)
        welcome = await agent.hear()
        assert isinstance(welcome, Welcome) and welcome.beat_s == 1.0
        assert welcome.at == pytest.approx(desk.controller.clock(), abs=5)
        assert desk.controller.view.phase is Phase.WAITING
        await agent.hello()
        launch = await agent.errand()
        assert isinstance(launch, LaunchHere) and launch.store_port == 7001
        await agent.answer(launch)
        await desk.phase(Phase.STARTING)
        await agent.beat(3)
        await desk.phase(Phase.TRAINING)
        await agent.post(Ended(node="a", generation=1))
        stop = await agent.errand()
        assert isinstance(stop, StopHere) and stop.generation == 1
        await agent.answer(stop)
        leave = await agent.errand()
        told = Leave(id=leave.id, code=0, grace_s=2.0, reason="all ranks ended well", ended=True)
        assert leave == told
        await agent.answer(leave)
        await desk.phase(Phase.DONE)


async def test_a_post_is_acknowledged_once_it_is_on_disk(desk_of: Open) -> None:
    async with desk_of(Job(run_id="r", min_nodes=2, max_nodes=2, can_acquire=False)) as desk:
        agent = await desk.link("a")
        await agent.hello()
        await agent.hear()
        before = desk.controller.seq
        await agent.post(Ended(node="a", generation=9))  # leads to no action, so nothing else would put it on disk
        assert await agent.hear() == Ack(seq=1)
        journal = desk.controller.journal
        assert isinstance(journal, SqliteJournal)
        other = SqliteJournal(journal._path, read_only=True)
        assert any(isinstance(entry.event, Ended) for entry in other.read(before))
        other.close()


async def test_a_hello_that_comes_late_by_an_older_link_does_not_replace_the_newer_one(desk_of: Open) -> None:
    async with desk_of(Job(run_id="r", min_nodes=2, max_nodes=2, can_acquire=False)) as desk:
        older, newer = await desk.link("a"), await desk.link("a")
        await newer.hello()
        assert isinstance(await newer.hear(), Welcome)
        await older.hello(ready=False)  # said before the link was lost, and long under way
        await older.post(Ended(node="a", generation=9))
        assert await older.hear() == Ack(seq=1), "whoever is late is not welcomed anew"
        await older.ws.close()
        await (await desk.link("b")).hello()
        assert isinstance(await newer.errand(), LaunchHere)


async def test_garbage_closes_the_link(desk_of: Open) -> None:
    async with desk_of() as desk:
        for packet in (b"garbage", b"\x81\xa4type\xa5hello", b""):
            agent = await desk.link("a")
            await agent.ws.send_bytes(packet)
            message = await agent.ws.receive(timeout=10)
            assert message.type.name == "CLOSE" and message.data == 1003
        agent = await desk.link("a")
        await agent.ws.send_str("text")
        assert (await agent.ws.receive(timeout=10)).type.name in ("CLOSE", "CLOSED")
        assert (await desk.client.get("/api/v1/status", headers=HEADERS)).status == 200


async def test_an_oversized_message_closes_the_link(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.link("a")
        await agent.ws.send_bytes(bytes((1 << 20) + 1))
        message = await agent.ws.receive(timeout=10)
        assert message.type.name == "CLOSE" and message.data == 1009


async def test_nobody_speaks_for_another_node(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.link("b")
        await agent.beat(1)  # before any hello
        await agent.post(Ended(node="b", generation=1))
        await agent.hello(ready=False)
        await agent.hear()
        agent.node = "a"
        await agent.beat(5)
        agent.node = "b"
        await agent.beat(7)
        await desk.until(lambda: "b" in desk.controller.registry.beats, "a beat")
        assert set(desk.controller.registry.beats) == {"b"}
        assert not any(isinstance(event, Ended) for event in desk.events())


def _about(*nodes: str) -> Alarm:
    return Alarm(kind=Kind.HEALTH, at=1.0, suspects=nodes, reason=" ".join(nodes), stance=Stance.NOTIFY)


def _told(desk: Desk) -> list[str]:
    return [event.reason for event in desk.events() if isinstance(event, Alarm) and event.kind is Kind.HEALTH]


async def test_what_is_wrong_with_a_host_is_told_by_one_of_its_nodes(desk_of: Open) -> None:
    async with desk_of() as desk:
        agents = {node: await desk.link(node) for node in "ab"}
        for agent in agents.values():
            await agent.hello(ready=False)
            await agent.hear()
        await agents["a"].post(_about("a", "b"))
        await desk.until(lambda: _told(desk) == ["a b"], "an alarm")


async def test_a_node_of_another_host_accuses_itself_alone(desk_of: Open) -> None:
    def port(request: web.Request) -> Caller:
        node = request.query["node"]
        return Caller(name=node, node=ANY_NODE if node == "here" else node)

    async with desk_of(port=port) as desk:
        agents = {}
        for node in ("here", "far", "farther"):
            agents[node] = Agent(await desk.client.ws_connect(f"/agent?node={node}"), node)
            await agents[node].hello(ready=False)
            await agents[node].hear()
        await agents["far"].post(_about("far", "farther"))
        await agents["far"].post(_about("here"))
        await agents["here"].post(_about("far"))
        for node in ("here", "far"):
            await agents[node].post(_about(node))
        await desk.until(lambda: len(_told(desk)) >= 2, "two alarms")
        assert sorted(_told(desk)) == ["far", "here"]


async def test_a_node_that_comes_back_is_emptied_before_it_is_ready(desk_of: Open) -> None:
    async with desk_of(settings=QUICK) as desk:
        await desk.train()
        # It falls silent, and its link is hung up so that it must say what it holds.
        await desk.phase(Phase.WAITING)
        again = await desk.link("a")
        await again.hello(generation=1)
        stop = await again.errand()
        assert isinstance(stop, StopHere) and stop.generation == 1 and stop.id < 0
        ready = sum(isinstance(event, Ready) for event in desk.events())
        await again.answer(stop)
        relaunch = await again.errand()
        assert isinstance(relaunch, LaunchHere) and relaunch.generation == 2
        assert sum(isinstance(event, Ready) for event in desk.events()) == ready + 1
        assert stop.id < -(10**12), "a node remembers ids for ever: they must not start anew with a controller"


async def test_a_node_that_comes_back_is_told_to_stop_before_it_is_welcome(desk_of: Open) -> None:
    """After the welcome it may be without us for `node.lost_s` again, and nobody waits so long a second time."""
    async with desk_of(settings=QUICK) as desk:
        await desk.train()
        await desk.phase(Phase.WAITING)
        again = await desk.link("a")
        await again.hello(generation=1, ready=False)  # its agent, too, has just been started anew
        told = await again.hear()
        assert isinstance(told, ErrandMessage) and isinstance(told.errand, StopHere)
        assert isinstance(await again.hear(), Welcome)
        ready = sum(isinstance(event, Ready) for event in desk.events())
        await again.answer(told.errand)
        await desk.until(lambda: not desk.built.ingest._stale, "its answer")
        assert sum(isinstance(event, Ready) for event in desk.events()) == ready  # it is empty, and not ready
        await again.hello()
        assert isinstance(await again.errand(), LaunchHere)


async def test_a_node_whose_old_ranks_do_not_die_is_told_to_leave(desk_of: Open) -> None:
    async with desk_of(settings=QUICK) as desk:
        await desk.train()
        await desk.phase(Phase.WAITING)
        again = await desk.link("a")
        await again.hello(generation=1)
        stop = await again.errand()
        failed = Done(id=stop.id, node="a", ok=False, detail="1 rank does not die")
        await again.post(failed)
        leave = await again.errand()
        assert isinstance(leave, Leave) and leave.id not in (0, stop.id) and failed.detail in leave.reason


async def test_a_node_that_was_started_anew_has_lost_its_ranks(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        await agent.beat(-1, generation=0)
        stop = await agent.errand()
        assert isinstance(stop, StopHere) and stop.generation == 1
        [alarm] = [event for event in desk.events() if isinstance(event, Alarm)]
        assert alarm.kind is Kind.CRASH and "started anew" in alarm.reason


async def test_silence_hangs_up(desk_of: Open) -> None:
    async with desk_of(settings=QUICK) as desk:
        agent = await desk.link("a")
        await agent.hello(ready=False)
        await agent.hear()
        closed = await agent.ws.receive(timeout=10)
        assert closed.type.name == "CLOSE"
        assert any(isinstance(event, Alarm) and event.kind is Kind.SILENCE for event in desk.events())


async def test_one_that_is_back_while_ranks_are_stopped_is_not_forgotten(desk_of: Open) -> None:
    """It was silent just too long; by the time it is evicted it has said hello already, and says no other."""
    settings = Settings(silence=QUICK.silence, recovery=Limits(stop_s=30, stop_grace_s=0.0))
    async with desk_of(Job(run_id="r", min_nodes=2, max_nodes=2, can_acquire=False), settings) as desk:
        a, b = await desk.link("a"), await desk.link("b")
        alive = asyncio.create_task(_beating(b))
        await a.hello()
        await b.hello()
        for agent in (a, b):
            await agent.answer(await agent.errand())
        await desk.phase(Phase.STOPPING)  # a is silent; b is told to stop, and takes its time
        stop = await b.errand()
        again = await desk.link("a")
        await again.hello(generation=1)
        await again.answer(await again.errand())
        back = asyncio.create_task(_beating(again))
        await desk.until(lambda: [e.node for e in desk.events() if isinstance(e, Ready)].count("a") == 2, "a is back")
        await b.answer(stop)
        relaunch = await b.errand()
        assert isinstance(relaunch, LaunchHere) and relaunch.generation == 2
        alive.cancel()
        back.cancel()


async def _beating(agent: Agent) -> None:
    while True:
        await agent.beat(-1)
        await asyncio.sleep(0.05)


async def test_only_nodes_with_ranks_tell_of_storage(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        other = await desk.link("b")
        await other.hello(ready=False)
        missed = MissedCheckpoint(step=99, why="step 99 was not written")
        await other.post(Done(id=7, node="b", ok=True, stored=90, missed=missed))
        while not isinstance(await other.hear(), Ack):
            pass
        await agent.post(Done(id=8, node="a", ok=True, stored=1))
        storage = desk.controller.registry.storage
        await desk.until(lambda: storage.newest, "an answer")
        assert storage.newest and (storage.newest.step, storage.newest.missed) == (1, None)


async def test_a_node_told_to_leave_may_be_silent(desk_of: Open) -> None:
    async with desk_of(settings=QUICK) as desk:
        agent = await desk.link("a")
        await agent.hello(ready=False)
        await agent.hear()
        desk.controller.registry.record_departure("a")
        await agent.beat(-1)
        await asyncio.sleep(1.0)
        assert not any(isinstance(event, Alarm) for event in desk.events())


async def test_progress_precedes_an_alarm(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        await agent.beat(17)
        alarm = Alarm(kind=Kind.CRASH, at=1.0, suspects=("a",), ranks=(0,), generation=1, code=-9, reason="died")
        await agent.post(alarm)
        await desk.phase(Phase.STOPPING)
        *_, progress, heard = desk.events()
        assert isinstance(progress, Progress) and progress.step == 17
        assert heard == alarm


async def test_what_a_node_has_not_answered_is_told_again(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.link("a")
        await agent.hello()
        launch = await agent.errand()
        await agent.ws.close()
        again = await desk.link("a")
        await again.hello(generation=1)
        assert await again.errand() == launch
        await again.post(Done(id=launch.id, node="a", ok=True))
        await desk.phase(Phase.STARTING)


async def test_replicas_that_differ_are_heard_of_and_only_from_their_own_node(desk_of: Open) -> None:
    async with desk_of(settings=Settings(replica=ReplicaLimits(stance=Stance.NOTIFY))) as desk:
        agent = await desk.train(nproc=3)

        async def mark(step: int, *values: int, node: str = "a") -> None:
            marks = tuple(Mark(rank, step, "g", 3, "parameters", value) for rank, value in enumerate(values))
            await agent.ws.send_bytes(agent_messages.encode(HashReport(node=node, generation=1, marks=marks)))

        await mark(10, 7, 7, 7)
        await mark(20, 7, 8, 7, node="b")
        await desk.until(lambda: desk.controller.detectors.replicas.newest_equal_step() == 10, "marks")
        await mark(20, 7, 7, 9)
        await desk.until(lambda: any(isinstance(event, Alarm) for event in desk.events()), "an alarm")
        [alarm] = [event for event in desk.events() if isinstance(event, Alarm)]
        assert (alarm.kind, alarm.ranks, alarm.not_after) == (Kind.REPLICA, (2,), 10)


async def test_a_spike_that_all_nodes_see_is_told_once(desk_of: Open) -> None:
    async with desk_of() as desk:
        agent = await desk.train()
        spike = Alarm(
            kind=Kind.LOSS, at=1.0, suspects=("a",), ranks=(0,), generation=1, reason="stands out", stance=Stance.NOTIFY
        )
        for rank in range(3):
            await agent.post(msgspec.structs.replace(spike, ranks=(rank,)))
        await agent.post(msgspec.structs.replace(spike, signature="spike own times 2"))
        await desk.until(lambda: sum(isinstance(e, Alarm) for e in desk.events()) == 2, "two alarms")


@pytest.mark.parametrize("told", [{}, {"loss": 0.5}, {"loss_source": "wandb"}])
async def test_what_is_printed_of_a_loss_that_is_reported_is_no_news(desk_of: Open, told: dict[str, Any]) -> None:
    printed = Alarm(
        kind=Kind.LINES, at=1.0, suspects=("a",), ranks=(0,), generation=1, klass="nan_divergence",
        reason="prints a loss of nan", stance=Stance.NOTIFY,
    )  # fmt: skip
    async with desk_of() as desk:
        agent = await desk.train()
        await agent.ws.send_bytes(agent_messages.encode(Beat(node="a", generation=1, step=9, at=1.0, **told)))
        await agent.post(printed)
        await agent.post(msgspec.structs.replace(printed, klass="gpu_oom", reason="is short of memory"))
        await desk.until(lambda: any(e.klass == "gpu_oom" for e in desk.events() if isinstance(e, Alarm)), "the second")
        assert any(e.klass == printed.klass for e in desk.events() if isinstance(e, Alarm)) is not bool(told)


@pytest.mark.parametrize("limits", [BackupLimits(), BackupLimits(parity=True), BackupLimits(copies=2)])
async def test_who_comes_back_is_news_for_those_alone_whose_state_it_keeps(
    desk_of: Open, monkeypatch: pytest.MonkeyPatch, limits: BackupLimits
) -> None:
    """Told to everybody, it would be four million messages when 2,000 nodes find a new controller."""
    names = [f"n{number}" for number in range(8)]
    job = Job(run_id="r", min_nodes=len(names), max_nodes=len(names), can_acquire=False)
    async with desk_of(job, Settings(backup=limits)) as desk:
        agents = [await desk.link(name) for name in names]
        for agent in agents:
            await agent.hello()
        for agent in agents:
            await agent.answer(await agent.errand())
        aims = desk.controller.aims
        await desk.phase(Phase.STARTING)
        assert bool(aims.floor.halves) == limits.parity and bool(aims.floor.seconds) == (limits.copies > 1)
        aim, asked = aims.aim_of, set[str]()

        def noted(node: str) -> Aim:
            asked.add(node)
            return aim(node)

        monkeypatch.setattr(aims, "aim_of", noted)
        again = await desk.link("n0")
        await again.hello(generation=1)
        while not isinstance(await again.hear(), AimMessage):
            pass
        keeping = {n for n in names if "n0" in {aim(n).peer, aim(n).second, *(half.keeper for half in aim(n).halves)}}
        assert asked == {"n0", *keeping} and keeping and len(asked) < len(names)


async def tell_imports(agent: Agent, *modules: str, generation: int = 1) -> None:
    await agent.ws.send_bytes(agent_messages.encode(ScriptImports(generation=generation, modules=modules)))


async def hear_imports(agent: Agent) -> ScriptImports:
    while not isinstance(heard := await agent.hear(), ScriptImports):
        pass
    return heard


async def test_a_standby_hears_what_the_script_imports(desk_of: Open) -> None:
    async with desk_of(Job(run_id="r", min_nodes=1, max_nodes=1, standbys=2, can_acquire=False)) as desk:
        trains = await desk.train("a")
        waits = await desk.link("b")
        await waits.hello()
        await desk.until(lambda: "b" in desk.controller.view.pool, "a standby")
        await tell_imports(waits, "antigravity")  # it has no rank 0, and is not believed
        await tell_imports(trains, "antigravity", generation=2)
        await tell_imports(trains, "rich", "rich.table")
        assert await hear_imports(waits) == ScriptImports(generation=1, modules=("rich", "rich.table"))
        comes = await desk.link("c")
        await comes.hello(ready=False)
        assert (await hear_imports(comes)).modules == ("rich", "rich.table"), "before its first launch"
        await tell_imports(trains)  # ranks cannot be forked with them after all
        await desk.until(lambda: not desk.controller.registry.imports, "that it is taken back")
        last = await desk.link("d")
        await last.hello(ready=False)
        assert isinstance(await last.hear(), Welcome)
        await tell_imports(trains, "wave")
        assert (await hear_imports(last)).modules == ("wave",), "nothing was sent in between"


@pytest.mark.parametrize("modules", [("os; x",), ("",), ("a..b",), ("../x",), ("a\n",), ("x" * 201,), ("m",) * 4097])
def test_what_is_no_list_of_modules_is_refused(modules: tuple[str, ...]) -> None:
    told = ScriptImports(generation=1, modules=modules)
    with pytest.raises(msgspec.DecodeError):
        agent_messages.decode_from_agent(agent_messages.encode(told))
    with pytest.raises(msgspec.DecodeError):
        agent_messages.decode_from_controller(agent_messages.encode(agent_messages.ControllerPacket(1, told)))
