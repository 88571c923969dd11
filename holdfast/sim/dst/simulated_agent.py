"""The agent of a simulated machine: the real `core/agent_state_machine.py` in a simulated version of `agent/main.py`.

Names are those of `agent/main.py`, so that the two can be read side by side.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.core.agent_state_machine import (
    AgentProtocol,
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
from holdfast.core.detect.crash import alarm_of
from holdfast.model.errand import Errand, LaunchHere, Leave, PairTestHere, ProbeHere, ReplayHere, StageHere, StopHere
from holdfast.model.probe import Finding
from holdfast.model.release import Release
from holdfast.model.signal import Beat, Exit, Loss
from holdfast.model.stacks import Frame, Process, Thread, Trace
from holdfast.sim.dst.simulated_keeper import SimKeeper, SimSnapshot
from holdfast.sim.dst.simulated_link import SimLink
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import Ack, AimMessage, ErrandMessage, Hello, TraceAnswer, TraceRequest, Welcome

if TYPE_CHECKING:
    from holdfast.sim.dst.simulated_machine import SimMachine, SimRank

POLL_S = 0.25
_REDIAL_S = 0.05
_COPY_S = 0.3
_UNKILLABLE_S = 10.0
LEAVE_S = 20.0  # a node that is to leave has by then, whatever its ranks do


class SimAgent:
    def __init__(self, machine: "SimMachine") -> None:
        self.machine = machine
        self.world = machine.world
        self.clock = machine.clock
        self.rng = machine.world.rng
        settings = self.world.setup.settings
        self.life = AgentProtocol(machine.name, settings.node, self._note_parting())
        self.keeper = SimKeeper(machine.name, machine.memory, self.world.setup.verified)
        self.beat_s = settings.silence.beat_s
        self.alive = True
        self.link: SimLink | None = None
        self._offset_s = self.clock.wall() - self.clock.mono()  # what to add to an instant of the steady clock
        self._known = False  # a controller has told its time
        self._undated: list[SimRank] = []
        self._beat_at = 0.0
        self._wait_s = _REDIAL_S
        self._stopped = 0  # ranks of generations up to this one may not start any more
        self._first_said = 0
        self._staged = False  # what the controller has said that ranks may run here

    def later(self, delay_s: float, call: Callable[..., object], *args: object) -> None:
        self.world.call_later(delay_s, self._if_alive, call, *args)

    def _if_alive(self, call: Callable[..., object], *args: object) -> None:
        if self.alive:
            call(*args)

    def run(self) -> None:
        if self.machine.leaves:
            self.later(LEAVE_S, self.world.truth.on_stay, self.machine.name)
        self._recall_notes()
        self.keeper.recall_launch(self.machine.disk.launch)
        self.later(self.rng.random() * POLL_S, self._poll_ranks)
        self._dial_controller()

    def end_process(self) -> None:
        """Kill the agent: it finishes nothing that it had begun, and the kernel closes its link."""
        self.alive = False
        if self.link:
            self.link.hang_up()

    # --- state that outlives an agent --------------------------------------------------------------------------

    def _recall_notes(self) -> None:
        machine = self.machine
        newest = max((generation for generation, _ in machine.held), default=0)
        ranks = tuple(rank for generation, rank in machine.held if generation == newest)
        disk = machine.disk
        self._do(self.life.restore_state(tuple(disk.done), newest, ranks, disk.stopped, disk.leaving, epoch=disk.epoch))
        for held in list(machine.held.values()):
            if held.code is not None:
                self.on_rank_exit(held)

    def _do(self, deeds: tuple[Deed, ...]) -> None:
        for deed in deeds:
            match deed:
                case SendPost(post):
                    self._queue_packet(agent_messages.encode(post))
                case HeedEpoch(epoch):
                    self.machine.disk.write_epoch(epoch)
                case RememberDone(done):
                    if self.world.faults.kills_agent_at(self.machine, "carried"):
                        return
                    self.machine.disk.write_done(done)
                    if self.world.faults.kills_agent_at(self.machine, "remembered"):
                        return
                case RememberLeaving(errand):
                    self.machine.disk.write_leaving(errand)
                    if self.world.faults.kills_agent_at(self.machine, "remembered"):
                        return
                case CarryOut(errand):
                    self._run_errand(errand)
                case JudgeExit(exit):
                    self._do(self.life.step(self.clock.mono(), ExitJudged(exit, alarm_of(exit, self.world.catalog))))

    def _queue_packet(self, packet: bytes) -> None:
        if self.link:
            self.link.send_up(packet)

    # --- the link ----------------------------------------------------------------------------------------------

    def _dial_controller(self) -> None:
        link = self.world.dial_controller(self)
        if link is None:
            self._wait_s = min(2 * self._wait_s, 1.0)
            self._do(self.life.step(self.clock.mono(), LinkLost()))
            self._note_parting()
            self.later(self._wait_s, self._dial_controller)
            return
        self._wait_s, self.link = _REDIAL_S, link
        self.say_hello()

    def on_unlinked(self, link: SimLink) -> None:
        if self.alive and self.link is link:
            self.link = None
            self._do(self.life.step(self.clock.mono(), LinkLost()))
            self._note_parting()
            self.later(self._wait_s, self._dial_controller)

    def _note_parting(self) -> float:
        """Return since when the node has had no controller, even across restarts of the agent."""
        return self.machine.disk.write_parting(self.clock.mono())

    def on_message(self, link: SimLink, packet: bytes) -> None:
        if not self.alive or self.link is not link:
            return
        now = self.clock.mono()
        match agent_messages.decode_from_controller(packet):
            case Welcome(at=at, beat_s=beat_s, releases=releases, epoch=epoch):
                self._offset_s, self.beat_s, self._known = at - now, beat_s, True
                if not self._staged:
                    self._stage_releases(releases)
                self._do(self.life.step(now, LinkOpened(epoch)))
                self.machine.disk.alone = None
                self._send_beat()
                undated, self._undated = self._undated, []
                for held in undated:
                    self.on_rank_exit(held)
            case Ack(seq=seq):
                self.world.truth.on_ack(self.life, seq)
                self._do(self.life.step(now, PostAcknowledged(seq)))
            case ErrandMessage(errand=errand, epoch=epoch):
                self._do(self.life.step(now, ErrandReceived(errand, epoch)))
            case AimMessage(aim=aim):
                self.keeper.apply_aim(aim)
            case TraceRequest() as look:
                self.later(0.2, self._trace_stacks, look)

    def _trace_stacks(self, look: TraceRequest) -> None:
        at = self.clock.mono() + self._offset_s
        held = [h for h in self.machine.held.values() if h.generation == self.life.generation and h.code != 0]
        waits = (Frame("all_reduce", "distributed_c10d.py", 7),)
        found = tuple(
            Process(
                node=self.machine.name,
                rank=one.rank,
                pid=one.rank + 1,
                state="Z" if one.code is not None else "T" if one.hung else "S",
                threads=(Thread(main=True, frames=waits),),
            )
            for one in held
        )
        self._queue_packet(
            agent_messages.encode(TraceAnswer(id=look.id, trace=Trace(node=self.machine.name, at=at, processes=found)))
        )

    def say_hello(self) -> None:
        running = max((held.generation for held in self.machine.running_ranks()), default=0)
        hello = Hello(
            node=self.machine.name,
            host=self.machine.name,
            nproc=self.world.setup.nproc,
            order=self.machine.order,
            generation=self.life.occupied_by(running),
            ready=self._staged and self.machine.warm and not self.life.leaving,
            copies=self.keeper.list_copies(),
            keeper=(self.machine.name, 1),
            epoch=self.life.epoch,
        )
        self._queue_packet(agent_messages.encode(hello))

    def _stage_releases(self, releases: tuple[Release, ...]) -> None:
        """Stage releases on this node; it is not ready before it has the code that it may have to run."""
        self.machine.releases.update(release.number for release in releases)
        self.later(self.rng.uniform(0.01, 0.5), self._on_staged)

    def _on_staged(self) -> None:
        self._staged = True
        self.say_hello()

    # --- errands -----------------------------------------------------------------------------------------------

    def _run_errand(self, errand: Errand) -> None:
        """Carry out an errand; the answer follows when it is done, unless the agent dies before."""
        self.world.truth.on_carry(errand.id)
        self.world.log_line(f"{self.machine.name}: carries out {type(errand).__name__} {errand.id}")
        match errand:
            case LaunchHere():
                self.keeper.begin_launch(errand)  # what is given up is dropped, whatever becomes of the note
                if error := self.machine.disk.write_launch(errand):
                    self.later(0.01, self._on_launched, errand, error)
                    return
                self.machine.releases.add(errand.release.number)
                self._launch_ranks(errand)
            case StopHere() | Leave():
                if isinstance(errand, Leave):
                    self.machine.leaves = not self.machine.disk.full  # or the next agent cannot know
                    self.world.faults.on_leaving(self.machine)
                generation = errand.generation if isinstance(errand, StopHere) else self.life.generation
                self._stop_ranks(errand, generation)
            case ProbeHere() | PairTestHere():
                finding = Finding(probe="gemm", level=1, place="cpu", ok=True)
                self.later(self.rng.uniform(0.5, 4.0), self._carried, ErrandDone(errand, True, findings=(finding,)))
            case ReplayHere():
                self.later(1.0, self._carried, ErrandDone(errand, False, "no replays here"))
            case StageHere(release=release):
                self.later(self.rng.uniform(0.1, 2.0), self._on_release, errand, release)

    def _on_release(self, errand: StageHere, release: Release) -> None:
        refused = errand.check and self.world.faults.draw_chance(0.1)
        error = "it does not compile" if refused else "no room" if self.world.faults.draw_chance(0.05) else ""
        if not error:
            self.machine.releases.add(release.number)
        self._carried(ErrandDone(errand, not error, error, refused=refused))

    def _carried(self, carried: ErrandDone) -> None:
        self._do(self.life.step(self.clock.mono(), carried))

    def _launch_ranks(self, errand: LaunchHere) -> None:
        self.machine.forget_ranks(errand.generation)
        delay_s = 0.0
        error = self.world.faults.launch_error()
        ranks = range(errand.seat.first_rank, errand.seat.first_rank + errand.seat.nproc)
        for rank in ranks[: len(ranks) - 1] if error else ranks:
            delay_s += self.rng.uniform(0.01, 0.3)
            self.later(delay_s, self._start_rank, errand, rank)
        self.later(delay_s + 0.05, self._on_launched, errand, error)

    def _start_rank(self, errand: LaunchHere, rank: int) -> None:
        if errand.generation > self._stopped:
            self.machine.start_rank(errand, rank)

    def _on_launched(self, errand: LaunchHere, error: str) -> None:
        if errand.generation <= self._stopped:
            error = error or "it was told to stop before it had started"
        self._carried(ErrandDone(errand, not error, error))

    def _stop_ranks(self, errand: StopHere | Leave, generation: int) -> None:
        self.machine.disk.write_stopped(generation)
        self._send_beat()  # the last steps, before the ranks are gone
        self._stopped = max(self._stopped, generation)
        delay_s = 0.02 + self.rng.random() * min(1.0, errand.grace_s + 0.1)
        self.later(delay_s, self._kill_ranks, errand, generation, self.clock.mono() + _UNKILLABLE_S)

    def _kill_ranks(self, errand: StopHere | Leave, generation: int, until: float) -> None:
        for held in self.machine.running_ranks(generation):
            held.killed = True
            if not held.unkillable:
                self.machine.end_rank(held, -15)
        left = self.machine.running_ranks(generation)
        if left and self.clock.mono() < until:
            self.later(1.0, self._kill_ranks, errand, generation, until)
            return
        error = f"{len(left)} ranks do not die" if left else ""
        copies = self.keeper.list_copies() if isinstance(errand, StopHere) else ()
        self._carried(ErrandDone(errand, not error, error, copies))
        if isinstance(errand, Leave) and self.alive and not self.world.faults.kills_agent_at(self.machine, "carried"):
            self.world.call_later(0.2, self.machine.end_holder, errand.id)

    # --- ranks -------------------------------------------------------------------------------------------------

    def on_rank_exit(self, held: "SimRank") -> None:
        if not self._known:
            self._undated.append(held)
            return
        exit = Exit(
            node=self.machine.name,
            generation=held.generation,
            rank=held.rank,
            code=held.code if held.code is not None else 1,
            at=held.ended_mono + self._offset_s,
            words=held.words,
        )
        self._send_beat()
        self._do(self.life.step(self.clock.mono(), RankExited(exit)))

    def _send_beat(self) -> None:
        self._beat_at = self.clock.mono()
        if self._known:
            running = sum(held.generation == self.life.generation for held in self.machine.running_ranks())
            self._queue_packet(agent_messages.encode(msgspec.structs.replace(self._summarize_ranks(), running=running)))

    def _summarize_ranks(self) -> Beat:
        """Summarize the node's ranks in a beat; the slowest rank's step stands for the node."""
        generation, machine = self.life.generation, self.machine
        readings = [h for h in machine.held.values() if h.generation == generation and h.step >= 0]
        if generation == 0 or len(readings) < self.world.setup.nproc:
            return Beat(node=machine.name, generation=generation, step=-1, at=0.0)
        slowest = min(readings, key=lambda h: (h.step, -h.stepped_mono))
        wall_s = self._offset_s
        return Beat(
            node=machine.name,
            generation=generation,
            step=slowest.step,
            at=slowest.stepped_mono + wall_s,
            sent=self.clock.mono() + wall_s,
            first_step=min(h.first_step for h in readings),
            first_at=max(h.first_mono for h in readings) + wall_s,
            counted=False,
            loss=float("nan") if any(h.nan_since >= 0 for h in readings) else 1.0,
            sealed=self.keeper.sealed_step(),
            backed=self.keeper.backed,
            backing_s=_COPY_S,
            stored=self.keeper.stored,
            verifies=self.keeper.verifies,
        )

    def _poll_ranks(self) -> None:
        self._do(self.life.step(self.clock.mono(), ClockTick()))
        if not self.alive:
            return
        self._look_at_losses()
        if ready := self.keeper.ready_snapshots():
            self._send_copies(ready)
        now = self.clock.mono()
        first = self._first_said != self.life.generation and self._summarize_ranks().step >= 0
        if first:
            self._first_said = self.life.generation
        if first or now >= self._beat_at + self.beat_s:
            self._send_beat()
        self.later(POLL_S, self._poll_ranks)

    def _look_at_losses(self) -> None:
        for held in list(self.machine.held.values()) if self._known else ():
            if held.nan_since >= 0 and held.generation == self.life.generation:
                loss = Loss(
                    node=self.machine.name,
                    generation=held.generation,
                    rank=held.rank,
                    step=held.nan_since,
                    loss=float("nan"),
                    at=held.stepped_mono + self._offset_s,
                )
                self._do(self.life.step(self.clock.mono(), BadLossSeen(loss)))

    def _send_copies(self, ready: dict[int, SimSnapshot]) -> None:
        """Start sending copies of ready snapshots to the peer."""
        step = next(iter(ready.values())).step
        self.keeper.sending = step
        self.later(_COPY_S * self.rng.uniform(0.3, 2.0), self._sent, self.keeper.generation, self.keeper.aim.peer, step)

    def _sent(self, generation: int, peer: str, step: int) -> None:
        keeper = self.keeper
        if keeper.generation != generation or keeper.sending != step:
            return
        ready = {rank: keeper.memory.own[rank].find_step(step) for rank in keeper.ranks if rank in keeper.memory.own}
        there = self.world.machines.get(peer)
        reached = not peer or (there and there.is_connected and self.machine.is_connected and there.agent)
        world = self.world.world_size(generation)
        kept = reached and all(
            snap and (not peer or there.agent.keeper.keep_copy(rank, generation, world, snap))  # type: ignore[union-attr]
            for rank, snap in ready.items()
        )
        if kept:
            keeper.sending, keeper.backed = 0, step
            self._send_beat()
        else:
            self.later(1.0, self._sent, generation, peer, step)
