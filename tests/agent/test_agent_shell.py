"""The agent between its ranks and the controller: what it remembers, what it tells."""

import asyncio
import mmap
import socket
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.agent import agent_shell
from holdfast.agent.agent_shell import Agent
from holdfast.agent.agent_state_files import AgentStateFiles
from holdfast.agent.main import build_agent
from holdfast.agent.rank import last_words
from holdfast.agent.rank.rank_processes import RankProcesses
from holdfast.agent.snapshots.keeper import Keeper
from holdfast.core.agent_state_machine import (
    AlarmNoticed,
    ClockTick,
    ErrandDone,
    ErrandReceived,
    Post,
    RememberDone,
    RememberLeaving,
)
from holdfast.core.detect.crash import alarm_of
from holdfast.core.detect.job_progress import LEAD
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing, ListedCheckpoint
from holdfast.logs import catalog_files
from holdfast.logs.secret_masking import Masker
from holdfast.model.code_release import Release
from holdfast.model.copy_aim import Aim
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import Done, LaunchHere, Leave, StopHere
from holdfast.model.observation import Beat, Exit
from holdfast.model.probe_findings import Finding
from holdfast.model.replay_task import ReplayResult
from holdfast.wire import agent_messages, holder_messages, run_and_node_specs
from holdfast.wire.agent_messages import (
    AimMessage,
    ControllerPacket,
    ErrandMessage,
    JobFigures,
    NodeNotice,
    PeersMessage,
    ReachRequest,
    ScriptImports,
    TraceRequest,
    Welcome,
)
from holdfast.wire.credentials.admitted_peers import AdmittedPeers
from holdfast.wire.holder_messages import (
    HolderRank,
    KillRank,
    QuitHolder,
    RankEnded,
    RankKey,
    SweepDone,
    SweepLeftovers,
)
from holdfast.wire.rank_memory.flight_log_writer import slot_memory_bytes
from holdfast.wire.rank_memory.slot_writer import SlotWriter
from tests.agent.disk_without_room import leave_no_room
from tests.fleet.places import TEMPLATE

LAUNCH = LaunchHere(
    id=6, generation=2, seat=Seat(node="n0", group_rank=0, first_rank=0, nproc=2), world_size=2, group_world_size=1,
    store_host="h", store_port=1, run_id="r", max_restarts=0,
)  # fmt: skip


async def judged(exit: Exit, where: Path) -> Alarm:
    """Here and now; how a process of its own does it, test_last_words_judge.py shows."""
    return alarm_of(msgspec.structs.replace(exit, words=last_words.last_words(where)), catalog_files.load_built_in())


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The agent's, and the holder's."""
    ours, theirs = holder_messages.make_socket_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def agent(tmp_path: Path, ends: tuple[socket.socket, socket.socket]) -> Agent:
    node = msgspec.structs.replace(TEMPLATE, node="n0", nproc=2, log_dir=str(tmp_path / "logs"))
    run_and_node_specs.write_json(tmp_path / "spec.json", node)
    made = build_agent(tmp_path, ends[0], judged, Masker(hosts=False))
    ranks_of(made).slots.arena = mmap.mmap(-1, slot_memory_bytes(2))
    return made


def ranks_of(agent: Agent) -> RankProcesses:
    """The real ones, behind the agent's port."""
    assert isinstance(agent.ranks, RankProcesses)
    return agent.ranks


def arena_of(agent: Agent) -> mmap.mmap:
    arena = ranks_of(agent).slots.arena
    assert arena is not None
    return arena


def told(agent: Agent) -> list[object]:
    found: list[object] = []
    while not agent._outbox.empty():
        found.append(agent_messages.decode_from_agent(agent._outbox.get_nowait()))
    return found


async def test_an_agent_goes_on_where_its_predecessor_was(agent: Agent, tmp_path: Path) -> None:
    AgentStateFiles(tmp_path).write_deed(RememberDone(Done(id=1, node="n0", ok=True)))
    run_and_node_specs.publish_file(tmp_path / "stopped", b"2\n")
    ranks_of(agent).held = {
        RankKey(2, 0): HolderRank(key="2:0", pid=1, code=-9, at=1.0),
        RankKey(3, 0): HolderRank(key="3:0", pid=2, code=-11, at=time.monotonic()),
        RankKey(3, 1): HolderRank(key="3:1", pid=3),
    }
    (tmp_path / "logs" / "gen-3" / "rank-0").mkdir(parents=True)
    (tmp_path / "logs" / "gen-3" / "rank-0" / "stderr.log").write_text("Segmentation fault\n")
    agent._recall_state()
    assert (agent.life.generation, agent.life.stopped, agent.life.expected) == (3, 2, {0, 1})
    assert not agent.life._outbox, "nobody has told us the time yet"
    agent._staged = True
    async with asyncio.TaskGroup() as agent._tasks:
        agent._on_packet(ControllerPacket(1, Welcome(at=500.0, beat_s=1.0)))
    assert agent.life.expected == {1}
    posts = [post.body for post in agent.life._outbox.values()]
    assert len(posts) == 1, "the rank of generation 2 was ended by us, and is no news"
    [alarm] = posts
    assert isinstance(alarm, Alarm)
    assert (alarm.ranks, alarm.code, alarm.generation) == ((0,), -11, 3)
    assert alarm.evidence == ("Segmentation fault",)
    assert abs(alarm.at - 500.0) < 60, "in the controller's time, whatever the machine's clock says"


def test_the_time_without_a_controller_is_that_of_the_node_not_of_its_agents(agent: Agent, tmp_path: Path) -> None:
    limits = agent.identity.settings.node
    (tmp_path / "alone").write_text(f"{time.monotonic() - limits.lost_s}\n")
    ours, theirs = holder_messages.make_socket_pair()
    second = build_agent(tmp_path, ours, judged, Masker(hosts=False))
    assert second.life.step(time.monotonic(), ClockTick()), "it leaves at once"
    third = build_agent(tmp_path, ours, judged, Masker(hosts=False))
    third._staged = True
    third._on_packet(ControllerPacket(1, Welcome(at=500.0, beat_s=1.0)))
    assert not (tmp_path / "alone").exists()
    assert third.life.step(time.monotonic(), ClockTick()) == ()
    ours.close()
    theirs.close()


async def test_the_node_of_rank_0_tells_what_its_zygote_has(agent: Agent) -> None:
    agent._staged = True
    ranks_of(agent)._preloading.on_warm(("rich", "not a name", "rich.table", "x" * 201))
    agent._on_packet(ControllerPacket(1, Welcome(at=500.0, beat_s=1.0)))
    ranks_of(agent).held = {RankKey(2, 1): HolderRank(key="2:1", pid=2)}
    agent.life.generation = 2

    def imports() -> list[ScriptImports]:
        agent._tell_imports()
        return [one for one in told(agent) if isinstance(one, ScriptImports)]

    assert not imports(), "another node speaks for all"
    ranks_of(agent).held[RankKey(2, 0)] = HolderRank(key="2:0", pid=1)
    assert imports() == [ScriptImports(generation=2, modules=("rich", "rich.table"))]
    assert not imports(), "once on a link"
    agent._on_packet(ControllerPacket(1, Welcome(at=501.0, beat_s=1.0)))
    assert len(imports()) == 1
    ranks_of(agent)._preloading.on_warm(())
    assert imports() == [ScriptImports(generation=2, modules=())], "it is taken back"


async def test_news_of_copies_does_not_put_off_what_is_done_now_and_then(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that keep their state at every step send such news all the time; a zygote learnt nothing meanwhile."""
    learnt, polls, over = list[bool](), list[object](), asyncio.Event()

    def step(tick: object) -> None:
        polls.append(tick)
        agent._send_beat()
        if len(learnt) == 3 or len(polls) == 50:
            over.set()

    agent.beat_s = 0.4
    monkeypatch.setattr(agent.ranks, "learn_imports", learnt.append)
    monkeypatch.setattr(agent, "_step", step)
    polling = asyncio.create_task(agent._poll_ranks())
    await over.wait()
    polling.cancel()
    await asyncio.wait({polling})
    assert len(learnt) == 3


async def test_an_agent_goes_on_with_leaving(agent: Agent, tmp_path: Path) -> None:
    """A controller is there again, and has not been told that the rank was ended; nor will it be."""
    notes = AgentStateFiles(tmp_path)
    notes.write_deed(RememberLeaving(Leave(id=0, code=7, grace_s=0.0, reason="no controller for 60 s")))
    notes.write_stopped(1)
    ranks_of(agent).held = {RankKey(1, 0): HolderRank(key="1:0", pid=1, code=-15, at=1.0)}
    swept = ranks_of(agent)._swept = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as agent._tasks:
        agent._recall_state()
        agent._staged = True
        agent._on_packet(ControllerPacket(1, Welcome(at=500.0, beat_s=1.0)))
        asyncio.get_running_loop().call_later(0.1, swept.set_result, ())
    assert not agent.life._outbox
    assert (tmp_path / "left").read_text() == "no controller for 60 s\n"


async def test_ranks_are_ended_although_the_disk_takes_nothing(
    agent: Agent, tmp_path: Path, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a node that has lost its controller would go on for ever: its agent died before it had ended any."""
    (tmp_path / "done.jsonl").mkdir()
    leave_no_room(monkeypatch, "stopped", "left", "leaving.json", "launch.json")
    ranks_of(agent).held = {RankKey(1, 0): HolderRank(key="1:0", pid=2**31 - 1)}
    agent.life.restore_state((), 1, (0,), 0)
    async with asyncio.TaskGroup() as around:
        listening = around.create_task(agent.ranks.listen(asyncio.Event()))
        asked = around.create_task(_hold(ends[1]))
        for errand in (StopHere(id=5, generation=1, grace_s=1.0), LAUNCH, Leave(id=7, code=3, grace_s=1.0, reason="")):
            async with asyncio.TaskGroup() as agent._tasks:
                agent._on_packet(ControllerPacket(1, agent_messages.ErrandMessage(errand=errand)))
        await asked
        listening.cancel()
    assert asked.result() == [KillRank(key="1:0", signal=15), SweepLeftovers(), SweepLeftovers(), QuitHolder(code=3)]
    stopped, launched, left = (post.body for post in agent.life._outbox.values())
    assert (stopped, left) == (Done(id=5, node="n0", ok=True), Done(id=7, node="n0", ok=True))
    assert isinstance(launched, Done) and not launched.ok and "launch.json" in launched.detail


async def _hold(sock: socket.socket) -> list[holder_messages.ToHolder]:
    """As a holder does whose ranks listen."""
    sock.setblocking(False)
    asked: list[holder_messages.ToHolder] = []
    while not asked or not isinstance(asked[-1], QuitHolder):
        asked.append(
            holder_messages.to_holder(await asyncio.get_running_loop().sock_recv(sock, holder_messages.PACKET_BYTES))
        )
        match asked[-1]:
            case KillRank(key=key):
                sock.send(holder_messages.encode(RankEnded(rank=HolderRank(key=key, pid=1, code=-15, at=1.0))))
            case SweepLeftovers():
                sock.send(holder_messages.encode(SweepDone(left=())))
    return asked


def test_the_slowest_rank_speaks_for_the_node(agent: Agent) -> None:
    arena = arena_of(agent)
    agent.life.generation = 2
    slots = [SlotWriter(arena, index, generation=2, rank=4 + index) for index in range(2)]
    assert agent._summarize_ranks().step == -1
    slots[0].step(10)
    assert agent._summarize_ranks().step == -1, "not every rank has made a step"
    slots[0].step(9 + LEAD)
    ranks_of(agent).held = {RankKey(2, rank): HolderRank(key=f"2:{rank}", pid=1) for rank in (4, 5)}
    beat = agent._summarize_ranks()
    assert (beat.step, beat.mute) == (9 + LEAD, (5,)), "the other one tells of none, as it seems"
    slots[1].step(8)
    slots[0].step(10 + LEAD)
    beat = agent._summarize_ranks()
    assert beat.mute == ()
    assert (beat.node, beat.generation, beat.step, beat.first_step) == ("n0", 2, 8, 8)
    assert abs(beat.at - time.time()) < 5
    agent.controller_clock.on_welcome(time.time() + 1000)
    assert abs(agent._summarize_ranks().at - time.time() - 1000) < 5, "told in the controller's time"
    agent.life.generation = 3
    assert agent._summarize_ranks().step == -1, "these were of another generation"


async def test_a_rank_that_told_of_its_failure_and_stays_is_reported(agent: Agent) -> None:
    arena = arena_of(agent)
    agent.controller_clock.on_welcome(time.time())
    ranks_of(agent).held = {RankKey(1, 0): HolderRank(key="1:0", pid=1)}
    agent.life.restore_state((), 1, (0,), 0)
    SlotWriter(arena, 0, generation=1, rank=0).write_failure("ValueError: stuck in its own clean-up")
    now = time.monotonic()
    agent._look_for_latches(now)
    assert not agent.life._outbox, "it is given a moment to end by itself"
    async with asyncio.TaskGroup() as agent._tasks:
        agent._look_for_latches(now + 5)
        agent._look_for_latches(now + 10)
    [post] = agent.life._outbox.values()
    assert isinstance(post.body, Alarm) and "ValueError: stuck" in post.body.reason


@pytest.mark.parametrize("first", ["failure", "stop"])
async def test_a_failure_from_before_a_stop_is_told_although_our_signal_ended_the_rank(
    agent: Agent, first: str
) -> None:
    agent.controller_clock.on_welcome(time.time())
    agent.life.restore_state((), 1, (0, 1), 0)
    slot = SlotWriter(arena_of(agent), 0, generation=1, rank=0)
    stopping = ErrandReceived(StopHere(id=5, generation=1, grace_s=1.0))
    for then in (first, "stop" if first == "failure" else "failure"):
        if then == "failure":
            slot.write_failure("KeyError: 'tokens'")
        else:
            agent.life.step(time.monotonic(), stopping)
        await asyncio.sleep(0.01)
    async with asyncio.TaskGroup() as agent._tasks:
        agent._on_rank_exit(HolderRank(key="1:0", pid=1, code=-15, at=time.monotonic()))
        agent._on_rank_exit(HolderRank(key="1:1", pid=2, code=-15, at=time.monotonic()))
    alarms = [post.body for post in agent.life._outbox.values()]
    told = [(alarm.ranks, alarm.reason) for alarm in alarms if isinstance(alarm, Alarm)]
    assert told == ([((0,), "exited with code 1 (KeyError: 'tokens')")] if first == "failure" else [])


async def test_a_full_outbox_drops_beats_and_keeps_posts(agent: Agent) -> None:
    agent._send_beat()
    assert told(agent) == [], "nobody has told us the time yet"
    agent.controller_clock.on_welcome(time.time())
    for _ in range(1000):
        agent._send_beat()
    assert len(told(agent)) == agent_shell._OUTBOX
    ranks_of(agent).held = {RankKey(1, 0): HolderRank(key="1:0", pid=1, code=3, at=1.0)}
    agent.life.restore_state((), 1, (0,), 0)
    async with asyncio.TaskGroup() as agent._tasks:
        agent._on_rank_exit(agent.ranks.held[RankKey(1, 0)])
    assert len(agent.life._outbox) == 1


def test_a_loss_that_went_wrong_is_told_before_ranks_are_stopped(agent: Agent) -> None:
    """Or the step at which it did would be taken from a node that had it later."""
    agent.controller_clock.on_welcome(time.time())
    agent.life.restore_state((Done(id=5, node="n0", ok=True),), generation=1, ranks=(0, 1), stopped=0)
    mine = SlotWriter(arena_of(agent), 1, generation=1, rank=1)
    for step in (30, 31):
        mine.write_values(step, float("nan"), None, None)
        mine.step(step)
    agent._on_packet(
        ControllerPacket(1, agent_messages.ErrandMessage(errand=StopHere(id=5, generation=1, grace_s=1.0)))
    )
    alarm, done = (post.body for post in agent.life._outbox.values())
    assert isinstance(alarm, Alarm) and (alarm.ranks, alarm.not_after) == ((1,), 29)
    assert isinstance(done, Done)


async def test_what_an_agent_tells_is_masked(agent: Agent) -> None:
    """Also values that only a release has brought into the environment of ranks."""
    release = Release(number=2, env={"HUB_PASSWORD": "correct-horse-battery", "LR": "0.25"})
    agent._staged = True
    agent._on_packet(ControllerPacket(1, Welcome(at=500.0, beat_s=1.0, releases=(release,))))
    told(agent)
    quoted = "cannot log in with correct-horse-battery and lr 0.25"
    agent._send_notice(quoted)
    alarm = Alarm(kind=Kind.LINES, at=1.0, suspects=("n0",), reason=quoted, evidence=(quoted,))
    agent._step(AlarmNoticed(alarm))
    agent._step(ErrandDone(StopHere(id=5, generation=1, grace_s=0.0), False, quoted))
    notice, *posts = [one for one in told(agent) if isinstance(one, NodeNotice | Post)]
    bodies = [post.body for post in posts if isinstance(post, Post)]
    hidden = "cannot log in with <secret> and lr 0.25"
    assert isinstance(notice, NodeNotice) and notice.text == hidden
    first, second = bodies
    assert isinstance(first, Alarm) and (first.reason, first.evidence) == (hidden, (hidden,))
    assert isinstance(second, Done) and second.detail == hidden


PLACE = "sftp://me:correct-horse@host/ckpt"


async def test_what_an_agent_tells_of_probes_replays_and_storage_is_masked(agent: Agent) -> None:
    """A site's own test prints what it likes, and the address of a storage may hold a password."""
    agent._staged = True
    agent._on_packet(ControllerPacket(1, Welcome(at=500.0, beat_s=1.0, releases=())))
    told(agent)
    quoted = f"cannot reach {PLACE}"
    finding, played = (
        Finding(probe="command", level=2, ok=False, detail=quoted),
        ReplayResult(rank=0, ended=False, detail=quoted),
    )
    errand = StopHere(id=5, generation=1, grace_s=0.0)
    agent._step(ErrandDone(errand, False, findings=(finding,), played=(played,)))
    keeper = agent.keeper
    assert isinstance(keeper, Keeper)
    keeper._persisting.note_missed(0, 7, quoted)
    beat = agent._complete_beat(Beat(node="n0", generation=1, step=7, at=1.0))
    listed = ListedCheckpoint(name="step-7", step=7, why=quoted)
    keeper._persisting._report(CheckpointListing(generation=1, base=PLACE, checkpoints=(listed,)))
    found = told(agent)
    assert {type(one) for one in found} == {Post, CheckpointListing}
    assert "correct-horse" not in str(found) and str(found).count("<credentials>") == 4
    assert beat.missed and beat.missed.why == "cannot reach sftp://<credentials>@host/ckpt"


OLD_NEWS = (
    Welcome(at=500.0, beat_s=1.0, peers=AdmittedPeers(members=b"a" * 12)),
    PeersMessage(peers=AdmittedPeers(members=b"b" * 12)),
    agent_messages.Ack(seq=1),
    ErrandMessage(errand=StopHere(id=9, generation=1, grace_s=0.0)),
    AimMessage(aim=Aim(generation=1, floor=7)),
    ScriptImports(generation=1, modules=("antigravity",)),
    TraceRequest(id=1, deadline_s=0.0),
    ReachRequest(peers={"b": ("127.0.0.1", 1)}),
    JobFigures(generation=1, incidents=1, restarts=1, lost_s=1.0, ettr=None),
)


def test_each_kind_of_message_is_among_them() -> None:
    assert {type(one) for one in OLD_NEWS} == {*typing.get_args(agent_messages.FromController)}


@pytest.mark.parametrize("message", OLD_NEWS, ids=lambda message: type(message).__name__)
async def test_nothing_of_an_older_controller_has_an_effect(
    agent: Agent, tmp_path: Path, message: agent_messages.FromController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even before it is judged: its list of certificates, its stacks, its modules."""
    agent.life.restore_state((), 1, (0,), 0, epoch=3)
    calls = list[str]()

    def count(name: str) -> Callable[..., Any]:
        def call(*args: object) -> None:
            calls.append(name)

        return call

    for part, name in (
        (agent.keeper, "admit_peers"),
        (agent.keeper, "apply_aim"),
        (agent.keeper, "report_checkpoints"),
        (agent.staging, "stage_all"),
        (agent.ranks, "hear_imports"),
        (agent.ranks, "write_figures"),
        (agent.tracer, "trace_ranks"),
        (agent.controller_clock, "on_welcome"),
        (agent.notes, "clear_alone"),
        (agent, "_step"),
        (agent, "_reach"),
    ):
        monkeypatch.setattr(part, name, count(name))
    async with asyncio.TaskGroup() as agent._tasks:
        agent._on_packet(ControllerPacket(2, message))
    assert not calls and not told(agent)
    assert agent.life.epoch == 3 and agent.life.is_alone


@pytest.mark.parametrize("message", OLD_NEWS, ids=lambda message: type(message).__name__)
def test_every_packet_names_a_controller_that_there_may_be(message: agent_messages.FromController) -> None:
    for epoch in (0, -1, agent_messages.MOST_EPOCHS + 1):
        with pytest.raises(msgspec.DecodeError):
            agent_messages.decode_from_controller(agent_messages.encode(ControllerPacket(epoch, message)))
    with pytest.raises(msgspec.DecodeError):
        agent_messages.decode_from_controller(agent_messages.encode(message))
    packet = ControllerPacket(1, message)
    assert agent_messages.decode_from_controller(agent_messages.encode(packet)) == packet
