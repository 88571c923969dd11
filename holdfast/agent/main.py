"""The agent: dials the controller, carries out its errands on this node, reports what becomes of the ranks."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec

from holdfast.agent import agent_state_files
from holdfast.agent.connection.controller_clock import ControllerClock
from holdfast.agent.connection.controller_dialer import ControllerDialer
from holdfast.agent.diagnostics.diagnosis_errands import NodeDiagnosis
from holdfast.agent.health_monitor import HealthMonitor, MonitorPorts
from holdfast.agent.rank import last_words_judge, log_tail
from holdfast.agent.rank.failed_not_exited import LatchedFailures
from holdfast.agent.rank.heartbeat import make_beat, returned_ranks
from holdfast.agent.rank.judge_client import JudgeClient
from holdfast.agent.rank.log_rotation import LogRotation
from holdfast.agent.rank.loss_alarms import LossReports
from holdfast.agent.rank.rank_processes import RankProcesses, generation_of
from holdfast.agent.rank.stack_tracer import StackRequest, StackTracer, fit_trace
from holdfast.agent.releases.release_stager import ReleaseStager
from holdfast.agent.snapshots.keeper import Keeper
from holdfast.agent.snapshots.keeper_address import make_keeper_identity
from holdfast.agent.system import snapshot_memory
from holdfast.core.agent_state_machine import (
    OWN,
    AgentProtocol,
    AlarmNoticed,
    BadLossSeen,
    CarryOut,
    ClockTick,
    Deed,
    ErrandDone,
    ErrandReceived,
    ExitJudged,
    HeedEpoch,
    JudgeExit,
    LinkLost,
    LinkOpened,
    PostAcknowledged,
    RankExited,
    RememberDone,
    RememberLeaving,
    SendPost,
)
from holdfast.linux import warm_fork
from holdfast.model.alarm import Alarm
from holdfast.model.errand import Errand, LaunchHere, Leave, PairTestHere, ProbeHere, ReplayHere, StageHere, StopHere
from holdfast.model.release import Release
from holdfast.model.signal import Beat, Exit, Loss, Mark
from holdfast.wire import agent_messages, run_specs
from holdfast.wire.agent_messages import (
    Ack,
    AimMessage,
    ErrandMessage,
    HashReport,
    Hello,
    NodeNotice,
    TraceAnswer,
    TraceRequest,
    Welcome,
)
from holdfast.wire.holder_messages import HolderRank
from holdfast.wire.rank_memory import slot_reader

POLL_S = 0.1  # how often the slots are read until every rank has made its first step
_STEADY_S = 0.25  # and then: waking up is most of what an agent costs
_OUTBOX = 256
_REDIAL_S = 0.05  # after a link that broke; then longer and longer
_AGAIN_S = 5.0  # a release that could not be had is tried again
_ENVELOPE = 1 << 10  # of a message around a trace
_log = logging.getLogger("holdfast.agent")


class Agent:
    def __init__(self, node_dir: Path, sock: socket.socket, judge: Callable[[Exit, Path], Awaitable[Alarm]]) -> None:
        self.node_dir, self.judge = node_dir, judge
        self.spec = run_specs.read_json(node_dir / "spec.json", run_specs.NodeSpec)
        self.ranks = RankProcesses(self.spec, node_dir, sock, self._on_rank_exit)
        budget = snapshot_memory.SnapshotBudget(lambda: snapshot_memory.measure_room(node_dir, self.spec))
        self.keeper = Keeper(make_keeper_identity(self.spec, self.ranks.keeper_path), self.ranks.make_arena, budget)
        self.dialing = ControllerDialer(self.spec)
        self.staging = ReleaseStager(self.spec, node_dir, self.dialing)
        self.ranks.staged, self.keeper.told, self.keeper.hashing.told = (
            self.staging.staged_location,
            self._send_beat,
            self._send_marks,
        )
        self.ranks.say = self.staging.say = self.keeper.say = self._send_notice
        self.losses = LossReports(self.spec.node, self.spec.settings.loss)
        self.tracer = StackTracer(self.spec.node, self.spec.nproc)
        self.trying = NodeDiagnosis(self.spec, node_dir, self.ranks.environment_for)
        self.trying.entry = self.ranks.entry_for
        self.life = AgentProtocol(self.spec.node, self.spec.settings.node, agent_state_files.mark_alone(node_dir))
        self.life.on_bad_loss = self.spec.settings.loss.stance
        self.clock = ControllerClock()
        ties = MonitorPorts(self._on_alarm, lambda: [*self.ranks.held.values()], self.clock.wall_s)
        self.monitor = HealthMonitor(node_dir, self.spec, ties)
        self.beat_s = self.spec.settings.silence.beat_s
        self._undated: list[HolderRank] = []  # ended before we knew the controller's time
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(_OUTBOX)
        self._tasks: asyncio.TaskGroup
        self._beat_at, self._first_said = 0.0, 0  # the latter: generation whose first step was reported
        self._latches = LatchedFailures()
        self._staged = False  # what the controller has said that ranks may run here
        self._looking = asyncio.Lock()

    async def run(self) -> None:
        listed = asyncio.Event()
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self.ranks.listen(listed))
            await listed.wait()
            self._recall_state()
            self.keeper.adopt_arenas(self.ranks.arenas)
            own = (self._poll_ranks, self.monitor.run, self.staging.watch, self._say_when_warm)
            for deed in (
                self.keeper.serve,
                self.keeper.watch_snapshots,
                self.keeper.check_snapshots,
                self.keeper.hashing.run,
                *own,
            ):
                self._tasks.create_task(deed())
            self._tasks.create_task(LogRotation(self.spec).run(self.ranks.running_ranks))
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._on_leave_request)
            await self._keep_link()

    # --- state that outlives an agent --------------------------------------------------------------------------

    def _recall_state(self) -> None:
        done = agent_state_files.read_done(self.node_dir / "done.jsonl")
        keys = [tuple(int(part) for part in key.split(":")) for key in self.ranks.held]
        newest = max((generation for generation, _ in keys), default=0)
        ranks = tuple(rank for generation, rank in keys if generation == newest)
        stopped, leave = (
            agent_state_files.read_stopped(self.node_dir),
            agent_state_files.read_leave_intent(self.node_dir),
        )
        self._perform_deeds(
            self.life.restore_state(
                done, newest, ranks, stopped, leave, epoch=agent_state_files.read_epoch(self.node_dir)
            )
        )
        for held in self.ranks.held.values():
            if held.code is not None:
                self._on_rank_exit(held)

    def _perform_deeds(self, deeds: tuple[Deed, ...]) -> None:
        for deed in deeds:
            match deed:
                case SendPost(post):
                    self._queue_packet(agent_messages.encode(post))
                case HeedEpoch() | RememberDone() | RememberLeaving():
                    agent_state_files.write_deed(self.node_dir, deed)
                case CarryOut(errand):
                    self._tasks.create_task(self._run_errand(errand))
                case JudgeExit(exit):
                    self._tasks.create_task(self._judge_exit(exit))

    def _queue_packet(self, packet: bytes) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # posts stay in the machine's outbox until acknowledged
            self._outbox.put_nowait(packet)

    # --- the link ----------------------------------------------------------------------------------------------

    async def _keep_link(self) -> None:
        wait_s = _REDIAL_S
        while True:
            wait_s = _REDIAL_S if await self._run_link() else min(2 * wait_s, 1.0)
            self._perform_deeds(self.life.step(time.monotonic(), LinkLost()))
            agent_state_files.mark_alone(self.node_dir)
            await asyncio.sleep(wait_s)

    async def _run_link(self) -> bool:
        """Run one link to the controller until it ends; return whether it was opened."""
        linked = False
        try:
            async with self.dialing.open_link() as ws:
                linked = True
                await self._exchange_messages(ws)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as e:
            _log.info("no link to the controller: %s", e)
        return linked

    async def _exchange_messages(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()
        await ws.send_bytes(self._make_hello())
        sender = self._tasks.create_task(self._send_all(ws))
        try:
            async for message in ws:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self._on_message(agent_messages.decode_from_controller(message.data))
        finally:
            sender.cancel()

    async def _send_all(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            while True:
                await ws.send_bytes(await self._outbox.get())

    def _on_message(self, message: agent_messages.FromController) -> None:
        now = time.monotonic()
        match message:
            case Welcome(at=at, beat_s=beat_s, releases=releases, revoked=revoked, epoch=epoch):
                self.keeper.revoked = frozenset(revoked)
                self.beat_s = beat_s
                self.clock.on_welcome(at)
                if not self._staged:
                    self._tasks.create_task(self._stage_releases(releases))
                self._perform_deeds(self.life.step(now, LinkOpened(epoch)))
                agent_state_files.clear_alone(self.node_dir)
                self._send_beat()
                undated, self._undated = self._undated, []
                for held in undated:
                    self._on_rank_exit(held)
            case Ack(seq=seq):
                self._perform_deeds(self.life.step(now, PostAcknowledged(seq)))
            case ErrandMessage(errand=errand, epoch=epoch):
                if isinstance(errand, StopHere):
                    self._look_at_losses()  # whose went wrong first is to be heard before it is judged
                self._perform_deeds(self.life.step(now, ErrandReceived(errand, epoch)))
            case AimMessage(aim=aim, revoked=revoked):
                self.keeper.revoked = frozenset(revoked)
                self._tasks.create_task(self.keeper.apply_aim(aim))
            case TraceRequest():
                self._tasks.create_task(self._trace_stacks(message))

    async def _trace_stacks(self, look: TraceRequest) -> None:
        """Take a stack trace of the ranks in a thread and send it; concurrent requests wait their turn."""
        held = self.ranks.held.values()  # but for those that have ended well: nobody waits for them
        newest = tuple(r for r in held if generation_of(r.key) == self.life.generation and r.code != 0)
        asked = StackRequest(ranks=newest, deadline_s=look.deadline_s, native=look.native, offset_s=self.clock.wall_s())
        async with self._looking:
            trace = await asyncio.to_thread(self.tracer.take_trace, asked, self.ranks.arena)
        self._queue_packet(
            agent_messages.encode(TraceAnswer(id=look.id, trace=fit_trace(trace, agent_messages.MAX_BYTES - _ENVELOPE)))
        )

    def _make_hello(self) -> bytes:
        running = max((generation_of(r.key) for r in self.ranks.running_ranks()), default=0)
        hello = Hello(
            node=self.spec.node,
            host=socket.gethostname(),
            nproc=self.spec.nproc,
            order=self.spec.order,
            generation=self.life.occupied_by(running),
            ready=self._staged and self.ranks.warm.is_set() and not self.life.leaving,
            copies=self.keeper.list_copies(),
            keeper=self.keeper.address,
            epoch=self.life.epoch,
        )
        return agent_messages.encode(hello)

    def _send_notice(self, text: str) -> None:
        _log.warning("%s", text)
        self._queue_packet(agent_messages.encode(NodeNotice(node=self.spec.node, text=text)))

    async def _say_when_warm(self) -> None:
        await self.ranks.warm.wait()
        if self.ranks.cold:
            _log.warning("ranks are started afresh, not forked: %s", self.ranks.cold)
        self._queue_packet(self._make_hello())

    async def _stage_releases(self, releases: tuple[Release, ...]) -> None:
        """Stage these releases, retrying until all are here; then send another hello, as the node is ready now."""
        told = ""
        while error := await self.staging.stage_all(releases):
            if error != told:
                self._send_notice(error)
            told = error
            await asyncio.sleep(_AGAIN_S)
        self._staged = True
        self._queue_packet(self._make_hello())

    def _on_leave_request(self) -> None:
        """Leave because someone on this host asked (SIGINT), without waiting for the controller."""
        grace_s = self.spec.settings.recovery.shutdown_grace_s
        leave = Leave(id=OWN, code=128 + signal.SIGINT, grace_s=grace_s, reason="asked to, on this host")
        self._perform_deeds(self.life.step(time.monotonic(), ErrandReceived(leave)))

    # --- errands -----------------------------------------------------------------------------------------------

    async def _run_errand(self, errand: Errand) -> None:
        if isinstance(errand, ProbeHere | PairTestHere | ReplayHere):
            error, tried = await self.trying.run_errand(errand)
            carried = ErrandDone(errand, not error, error, findings=tried.findings, played=tried.played)
            self._perform_deeds(self.life.step(time.monotonic(), carried))
            return
        if isinstance(errand, StageHere):  # beside whatever else goes on
            error, refused = await self.staging.stage_and_check(errand)
            self._perform_deeds(self.life.step(time.monotonic(), ErrandDone(errand, not error, error, refused=refused)))
            return
        await self.trying.stop()
        if isinstance(errand, LaunchHere):
            self.losses.eases = errand.eases
            first = errand.seat.first_rank == 0
            error = self.keeper.begin_launch(errand) or await self.staging.begin_launch(errand.release, first=first)
            error = error or await self.ranks.launch_ranks(errand)
        else:
            generation = errand.generation if isinstance(errand, StopHere) else self.life.generation
            agent_state_files.write_stopped(self.node_dir, generation)
            self._send_beat()  # the last steps, before the ranks are gone
            self.life.returned = returned_ranks(self._read_slots().values(), generation)
            error = await self.ranks.stop_ranks(generation, errand.grace_s)
            await self.staging.gather_outputs()
        if isinstance(errand, Leave):
            await self.keeper.parting.write_last(errand.last, errand.last_s)
        copies = self.keeper.list_copies() if isinstance(errand, StopHere) else ()
        self._perform_deeds(
            self.life.step(time.monotonic(), ErrandDone(errand, not error, error, copies, stored=self.keeper.stored))
        )
        if isinstance(errand, Leave):
            _log.info("leaving with code %d: %s", errand.code, errand.reason)
            agent_state_files.write_leave_reason(self.node_dir, errand)
            await asyncio.sleep(0.2)  # for the answer to go out
            self.ranks.quit_holder(errand.code)

    # --- ranks -------------------------------------------------------------------------------------------------

    def _on_rank_exit(self, held: HolderRank) -> None:
        if not self.clock.known:
            self._undated.append(held)
            return
        generation, rank = (int(part) for part in held.key.split(":"))
        code = held.code if held.code is not None else 1
        if code and generation > self.life.stopped:
            self.monitor.on_rank_exit(held.at + self.clock.offset_s)
        reading = self._read_slots().get(held.key)
        exit = Exit(
            node=self.spec.node,
            generation=generation,
            rank=rank,
            code=code,
            at=held.at + self.clock.offset_s,
            starved=code == -signal.SIGKILL and self.monitor.kills.has_recent(),
            pressed=self.monitor.scarcely() if code == -signal.SIGKILL else "",
            latched=reading.failure if reading and reading.failed else "",
        )
        self._send_beat()
        self._perform_deeds(self.life.step(time.monotonic(), RankExited(exit)))

    async def _judge_exit(self, exit: Exit) -> None:
        alarm = await self.judge(exit, log_tail.rank_folder(self.spec.log_dir, exit.generation, exit.rank))
        self._perform_deeds(self.life.step(time.monotonic(), ExitJudged(exit, alarm)))

    def _on_alarm(self, alarm: Alarm) -> None:
        self._perform_deeds(self.life.step(time.monotonic(), AlarmNoticed(alarm)))

    def _read_slots(self) -> dict[str, slot_reader.SlotReading]:
        """Return what each rank last wrote to its progress slot, by rank key (`generation:rank`)."""
        found = (
            [slot_reader.read_slot(arena, at) for at in range(self.spec.nproc)] if (arena := self.ranks.arena) else []
        )
        return {f"{r.generation}:{r.rank}": r for r in found if r is not None}

    def _send_beat(self) -> None:
        self._beat_at = time.monotonic()
        if self.clock.known:
            beat = msgspec.structs.replace(
                self._summarize_ranks(), running=self.ranks.count_running(self.life.generation)
            )
            self._queue_packet(agent_messages.encode(beat))

    def _summarize_ranks(self) -> Beat:
        """Return the node's beat, with the step of its slowest rank; step -1 until every rank has made one."""
        generation, arena = self.life.generation, self.ranks.arena
        readings = [r for r in self._read_slots().values() if r.generation == generation and r.step >= 0]
        if generation == 0 or arena is None or len(readings) < self.spec.nproc:
            return Beat(node=self.spec.node, generation=generation, step=-1, at=0.0)
        backing, wall_s = self.keeper.backing, self.clock.offset_s
        return msgspec.structs.replace(
            make_beat(self.spec.node, readings, wall_s),
            sent=time.monotonic() + wall_s,
            arrivals=self.tracer.read_arrivals(arena, generation, self.clock.wall_s()),
            sealed=backing.newest_shared_step(),
            backed=backing.backed,
            backing_s=backing.took_s,
            kept=self.keeper.parity_step,
            stored=self.keeper.stored,
            verifies=backing.wants_verification(),
            compares=self.keeper.hashing.is_comparing,
            mesh=self.ranks.read_mesh(),
            replayable=self.ranks.read_replayable(),
        )

    async def _poll_ranks(self) -> None:
        while True:
            await asyncio.sleep(_STEADY_S if self._first_said == self.life.generation else POLL_S)
            now = time.monotonic()
            self._perform_deeds(self.life.step(now, ClockTick()))
            self._look_for_latches(now)
            self._look_at_losses()
            due = now >= self._beat_at + self.beat_s
            if due or (self._first_said != self.life.generation and self._summarize_ranks().step >= 0):
                if due:
                    self.ranks.learn_imports(trains := self._first_said == self.life.generation)
                    self.staging.complete(trains)
                    self.tracer.watch_ranks(self.ranks.held.values())
                else:
                    self._first_said = self.life.generation
                self._send_beat()

    def _look_for_latches(self, now: float) -> None:
        for held in self._latches.overdue_ranks(now, self.ranks.held, self._read_slots()):
            self._on_rank_exit(held)

    def _look_at_losses(self) -> None:
        if (arena := self.ranks.arena) is None or not self.clock.known:
            return
        for found in self.losses.read_slots(arena, self.spec.nproc, self.clock.offset_s):
            news = BadLossSeen(found) if isinstance(found, Loss) else AlarmNoticed(found)
            self._perform_deeds(self.life.step(time.monotonic(), news))
        self._send_marks(self.losses.take_marks())

    def _send_marks(self, marks: tuple[Mark, ...]) -> None:
        if marks:
            self._queue_packet(
                agent_messages.encode(HashReport(node=self.spec.node, generation=self.life.generation, marks=marks))
            )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    node_dir = Path(sys.argv[1])
    line = last_words_judge.start(node_dir)  # while we have no threads, and nothing open that it should not have
    asyncio.run(Agent(node_dir, socket.socket(fileno=int(sys.argv[2])), JudgeClient(line).judge_exit).run())


if __name__ == "__main__":
    warm_fork.run(main)
