"""A job's world in virtual time: nodes that come and go, training that advances, events that reach the decider."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

import msgspec

from holdfast.core.agent_state_machine import NodeLimits
from holdfast.core.decide.decider import Decider
from holdfast.core.detect.crash import alarm_of
from holdfast.core.detect.job_progress import JobPace, PaceLimits
from holdfast.core.detect.silence import SilenceLimits
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.model.decider_events import Event, Ready, Tick
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.job_and_seats import Seat
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.model.observation import Exit
from holdfast.sim.cost_model import CostModel, CostRange
from holdfast.sim.fault_source import FaultRates, NodeCut, NodeLoss, RankCrash, SimFault
from holdfast.sim.invariants import Invariant, InvariantWatch, UnsafeError
from holdfast.sim.simulated_executor import SimExecutor
from holdfast.sim.simulated_node import SimNode
from holdfast.sim.simulated_training import ALL, SimTraining

_NEIGHBOURS = 8  # how many ranks notice that a peer is gone before they are stopped
_ECHO = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.7]:24017"


class SimSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The setup of a simulation. The same setup, code and costs always give the same journal."""

    seed: int
    nodes: int
    nproc: int = 8
    standbys: int = 1
    shrink: int = 0  # on how many nodes fewer the job may go on
    days: float = 1.0
    acquire: bool = True  # whether the fleet can bring nodes; else somebody restarts the lost ones
    rates: FaultRates = FaultRates()
    script: tuple[tuple[float, SimFault], ...] = ()
    step_s: float = 10.0
    save_steps: int = 100  # ByteRobust: usual remote checkpoints are 30 minutes or 100 steps apart
    progress_s: float = 60.0


class JobWorld:
    def __init__(
        self, setup: SimSetup, costs: tuple[CostRange, ...], catalog: FailureCatalog, record: Callable[[Entry], None]
    ) -> None:
        self.setup = setup
        self.rng = Random(setup.seed)
        self.costs = CostModel(costs, self.rng)
        self.now = 0.0
        self.calm = False  # faults are off
        self.nodes: dict[str, SimNode] = {}
        self._decider = Decider()
        self.view = self._decider.view
        self.watch = InvariantWatch()
        self.executor = SimExecutor(self, setup.rates)
        self.training = SimTraining(setup.step_s, setup.save_steps)
        self.struck: dict[str, int] = {}  # faults that hit something, by kind
        self._pace = JobPace(PaceLimits(progress_s=setup.progress_s))
        self._silence = SilenceLimits()
        self._lost_s = NodeLimits().lost_s
        self._catalog = catalog
        self._record = record
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._pushed = 0
        self._seq = 0
        self._wake_at: float | None = None

    # --- time --------------------------------------------------------------------------------------------------

    def call_later(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        self._push_call(self.now + delay_s, call, *args)

    def _push_call(self, at: float, call: Callable[..., None], *args: object) -> None:
        self._pushed += 1  # of two things at the same instant the one planned first comes first
        heappush(self._queue, (at, self._pushed, call, args))

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until and self.view.phase is not Phase.DONE:
            self.now, _, call, args = heappop(self._queue)
            call(*args)
        if self.view.phase is not Phase.DONE:
            self.now = until

    def step_decider(self, event: Event) -> None:
        decision = self._decider.step(self.now, event)
        self._seq += 1
        entry = Entry(seq=self._seq, at=self.now, event=event, decision=decision)
        self._record(entry)
        self.watch.check_entry(entry, self.view)
        for action in decision.actions:
            self.executor.carry_out(action)
        if decision.wake_at is not None and decision.wake_at != self._wake_at:
            self._push_call(max(self.now, decision.wake_at), self._tick, decision.wake_at)
        self._wake_at = decision.wake_at

    def _tick(self, wake_at: float) -> None:
        if wake_at == self._wake_at:
            self.step_decider(Tick())

    def draw_chance(self, probability: float) -> bool:
        return not self.calm and self.rng.random() < probability

    # --- nodes -------------------------------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        """Add a node that has booted, passed its checks and reached the controller."""
        self.nodes[name] = SimNode(name=name)
        self._report_ready(name)

    def _report_ready(self, name: str) -> None:
        order = int(name.removeprefix("n"))
        self.step_decider(Ready(node=name, host=name, nproc=self.setup.nproc, order=order))

    def remove_node(self, node: SimNode) -> None:
        """Remove a node with everything on it."""
        node.alive, node.generation = False, 0
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]

    def strike_fault(self, fault: SimFault) -> None:
        up = [n for n in self.nodes.values() if n.alive and fault.node in ("", n.name)]
        if not up:
            return
        node = self.rng.choice(up)
        match fault:
            case RankCrash() if node.generation:
                self._crash_rank(node, fault)
            case NodeLoss():
                self._lose_node(node)
            case NodeCut() if not node.cut:
                self._cut_node(node, fault.for_s)
            case _:
                return
        kind = str(fault.__struct_config__.tag)
        self.struck[kind] = self.struck.get(kind, 0) + 1

    def _crash_rank(self, node: SimNode, fault: RankCrash) -> None:
        assert node.seat is not None
        if fault.defective:
            node.defect = msgspec.structs.replace(fault, node=node.name)
        rank = node.seat.first_rank + self.rng.randrange(node.seat.nproc)
        self._end_rank(node, rank, fault.code, fault.said)
        self._break_off(node)

    def _lose_node(self, node: SimNode) -> None:
        self._break_off(node)
        node.alive = False
        self._go_quiet(node)
        if not self.setup.acquire:
            self.call_later(self.costs("boot"), self._come_back, node)

    def _come_back(self, node: SimNode) -> None:
        """Add a node to the job again after a person repaired and restarted it."""
        self.remove_node(node)
        if node.name not in self.nodes:
            self.add_node(node.name)

    def _cut_node(self, node: SimNode, for_s: float) -> None:
        node.cut = True
        self._go_quiet(node)
        if for_s < self._lost_s:
            self.call_later(for_s, self._heal_link, node)
            return
        self.call_later(self._lost_s, self.remove_node, node)
        if not self.setup.acquire:
            self.call_later(for_s + self.costs("boot"), self._come_back, node)

    def _go_quiet(self, node: SimNode) -> None:
        node.quiet_since = since = self.now - self.rng.uniform(0.0, self._silence.beat_s)
        self._push_call(since + self._silence.silence_s + self.costs("look"), self._report_silence, node, since)

    def _report_silence(self, node: SimNode, since: float) -> None:
        if self.nodes.get(node.name) is not node or node.quiet_since != since:
            return  # it was released, or heard of again
        node.silent = True
        reason, signature = f"has been silent for {self._silence.silence_s:g} s", f"silence {node.name}"
        self._raise_alarm(Alarm(kind=Kind.SILENCE, at=since, suspects=(node.name,), reason=reason, signature=signature))
        self.executor.on_silent(node.name)

    def _heal_link(self, node: SimNode) -> None:
        if not node.alive:
            return
        missed = node.silent or node.name in self.view.gone
        node.cut, node.silent, node.quiet_since = False, False, None
        self.executor.on_relink(node)
        if missed:
            self.call_later(self.costs("tell", "stop"), self._report_empty, node)

    def _report_empty(self, node: SimNode) -> None:
        """End the node's old ranks, which belong to no current generation, and report the node ready."""
        if node.reachable and self.nodes.get(node.name) is node:
            self.stop_ranks(node, self.view.generation)
            self._report_ready(node.name)

    # --- ranks -------------------------------------------------------------------------------------------------

    def expect_none_but(self, generation: int) -> None:
        """Raise UnsafeError if ranks of another generation live on a node that has not left the job."""
        others = [n.name for n in self.nodes.values() if n.generation not in (0, generation)]
        known = [name for name in others if name not in self.view.gone]
        if known:
            where = f"on {', '.join(known)} when {generation} starts"
            raise UnsafeError(Invariant.OLD_RANKS_UNREACHABLE, where)

    def start_ranks(self, node: SimNode, seat: Seat, generation: int) -> None:
        if node.generation:
            where = f"{node.generation} on {node.name} when {generation} starts there"
            raise UnsafeError(Invariant.OLD_RANKS_UNREACHABLE, where)
        node.generation, node.seat = generation, seat

    def stop_ranks(self, node: SimNode, generation: int) -> None:
        node.stopped = max(node.stopped, generation)
        if node.generation and node.generation <= generation:
            self._stall_training(node.generation)
            node.generation = 0

    def _end_rank(self, node: SimNode, rank: int, code: int, said: str, after_s: float = 0.0) -> None:
        """End a rank after a delay; the agent's report reaches the controller a little later."""
        exit = Exit(
            node=node.name,
            generation=node.generation,
            rank=rank,
            code=code,
            at=self.now + after_s,
            words=(said,) if said else (),
        )
        self.call_later(after_s + self.costs("notice", "tell"), self._report_exit, node, exit)

    def _report_exit(self, node: SimNode, exit: Exit) -> None:
        if node.reachable and node.generation == exit.generation:  # else we ended it, or nobody hears
            self._raise_alarm(alarm_of(exit, self._catalog))

    def _break_off(self, node: SimNode) -> None:
        """Stall training because of this node. Ranks on some other nodes fail a moment later for this reason."""
        if not node.generation:
            return
        self._stall_training(node.generation)
        peers = [n for n in self.nodes.values() if n.generation == node.generation and n is not node and n.alive]
        for peer in self.rng.sample(peers, min(len(peers), _NEIGHBOURS)):
            assert peer.seat is not None
            rank = peer.seat.first_rank + self.rng.randrange(peer.seat.nproc)
            self._end_rank(peer, rank, 1, _ECHO, self.costs("echo"))

    # --- training ----------------------------------------------------------------------------------------------

    def on_launching(self, generation: int) -> None:
        self._pace.on_launch(generation, (ALL,))
        self.training.on_launch(generation)

    def on_launched(self, generation: int) -> None:
        self.call_later(self.costs("first_step"), self._first_step, generation)

    def _first_step(self, generation: int) -> None:
        if self.training.generation != generation or self.training.stalled:
            return
        self.training.first_step(self.now)
        self._advance_training(generation)
        for node in self.nodes.values():
            if node.defect and node.generation == generation:
                self.call_later(self.costs("relapse"), self._relapse_node, node, generation)

    def _relapse_node(self, node: SimNode, generation: int) -> None:
        if node.defect and node.generation == generation and not self.training.stalled and not self.calm:
            self.strike_fault(node.defect)

    def _stall_training(self, generation: int) -> None:
        if generation == self.training.generation:
            self.training.stall_steps(self.now)

    def _advance_training(self, generation: int) -> None:
        """Report the job's step at intervals, and at the instant when lost work has been redone."""
        if self.training.generation != generation or self.training.stalled:
            return
        best = self._pace.best
        self._report_step()
        caught_up_s = self.training.left_s(self.now, best)
        delay_s = min(self.setup.progress_s, caught_up_s) if caught_up_s > 0 else self.setup.progress_s
        self.call_later(delay_s, self._advance_training, generation)

    def _report_step(self) -> None:
        beat = self.training.newest_beat(self.now)
        progress = beat and (self._pace.on_beat(self.now, beat) or self._pace.flush_progress(self.now))
        if progress:
            self.step_decider(progress)

    def _raise_alarm(self, alarm: Alarm) -> None:
        self._report_step()  # exact news precede an alarm
        self.step_decider(alarm)
