"""Safety invariants, checked after every step of a decider, live or simulated."""

from enum import StrEnum

from holdfast.core.decide.job_view import JobView
from holdfast.core.incident.ladder import GAVE_UP
from holdfast.core.membership.seating import replica_ranks
from holdfast.core.membership.standbys import LONGEST_RETRY_S
from holdfast.model.action import Acquire, Action, Dismiss, Finish, Launch, Say, Stop
from holdfast.model.decider_events import Begin, Event, Lost, Order, Outcome, Progress, Ready, Successor, Tick
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.fleet_node_reports import FleetReport, FleetState
from holdfast.model.job_and_seats import Seat, world_size
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry

_AWAITING = (Phase.LAUNCHING, Phase.STOPPING, Phase.PROBING, Phase.PAUSING, Phase.ENDING)
_OVER = (Phase.ENDING, Phase.DONE)


class Invariant(StrEnum):
    """The conditions that a safe job meets. Each value states its condition in words."""

    ENTRIES_IN_ORDER = "entries follow one another"
    ACTION_IDS_GROW = "action ids grow"
    GENERATIONS_GROW = "generations grow by one"
    STOPPED_BEFORE_LAUNCH = "a generation is stopped before the next one is launched"
    NO_RANKS_LEFT = "no node may have old ranks when a generation is launched"
    OLD_RANKS_UNREACHABLE = "ranks of an older generation live on unreachable nodes only"
    WHOLE_REPLICAS = "a job on fewer nodes runs whole replicas of the model"
    ONE_SEAT_PER_NODE = "a node has one seat"
    RANKS_WITHOUT_GAPS = "ranks are numbered without gaps"
    NO_LOST_NODE = "no rank is launched on a node known as lost"
    ADMITTED_HAS_LINKS = "no standby whose link is down is admitted"
    ONE_PLACE_PER_NODE = "a node is standby, coming or gone, but one of these"
    ACTIVE_IS_NOTHING_ELSE = "who is active is nothing else"
    MISSING_IS_REQUESTED = "whoever is missing has been asked for"
    PHASE_IS_TOLD = "the decision tells the phase"
    TRAINING_ENDS_INCIDENT = "training ends the incident"
    STOP_HAS_REASON = "ranks are stopped for a reason"
    AWAITED_CAN_COME = "what is awaited can come"
    WAIT_ENDS = "no wait is without end"
    END_NEEDS_NO_CLOCK = "the end needs no clock"
    TICK_MOVES_ON = "a tick is not answered by a wish for the same tick"
    INCIDENT_CLOSED_ONCE = "every incident is closed once, in order"
    EVICTS_REPLACEABLE = "a node that answers is evicted only if the job can do without it"
    ENOUGH_IS_ENOUGH = "a job that has enough nodes does not give up for want of nodes"
    GIVES_UP_LATE = "the job does not give up too early"
    TRAINS_AGAIN = "the job trains again soon after the last fault"
    ENDS_WHEN_ORDERED = "the job ends soon after the order"


class UnsafeError(Exception):
    """An invariant is broken; the sentence says which, and at which entry."""

    def __init__(self, invariant: Invariant, detail: str = "", place: str = "") -> None:
        super().__init__(f"{place}broken: {invariant}{f' ({detail})' if detail else ''}")
        self.invariant, self.detail = invariant, detail


class UnconfirmedStop:
    """Checks that a launch after a stop that no node has confirmed waits for empty nodes or for a fence."""

    def __init__(self) -> None:
        self.fence_s = 0.0
        self.fleet_ends = True  # nodes that it was given back
        self._stops: dict[int, tuple[set[str], set[str]]] = {}  # by id: who had ranks, and who was told
        self._dismissed: dict[int, str] = {}
        self._empty: set[str] = set()  # reported since the last launch, so their ranks had ended
        self._left: set[str] = set()
        self._until = 0.0

    def on_event(self, at: float, event: Event) -> None:
        match event:
            case Begin(fence_s=fence_s, job=job):
                self.fence_s, self.fleet_ends = fence_s, job.can_acquire
            case Ready(node=node):
                self._mark_empty(node)
            case Order(verb="evict", node=node):
                self._mark_empty(node)
            case FleetReport(nodes=nodes):
                for node in [node for node, seen in nodes.items() if seen.state is FleetState.GONE]:
                    self._mark_empty(node)
            case Outcome(action=id, ok=True) if id in self._dismissed:
                self._mark_empty(self._dismissed[id])
            case Outcome(action=id, failed=failed) if id in self._stops:
                seated, told = self._stops.pop(id)
                if not (told - set(failed) or seated & self._empty):
                    self._left, self._until = seated, at + self.fence_s

    def _mark_empty(self, node: str) -> None:
        self._empty.add(node)
        self._left.discard(node)

    def on_action(self, at: float, action: Action, active: frozenset[str]) -> None:
        match action:
            case Stop(id=id, nodes=nodes):
                self._stops[id] = set(active), set(nodes)
            case Dismiss(id=id, node=node) if self.fleet_ends:
                self._dismissed[id] = node
            case Launch(generation=generation):
                left = f"{', '.join(sorted(self._left))} at generation {generation}"
                _require(not self._left or at >= self._until, Invariant.NO_RANKS_LEFT, left)
                self._left, self._empty = set(), set()


class InvariantWatch:
    """Checks every entry against the decider that made it; raises UnsafeError at the first broken invariant."""

    def __init__(self) -> None:
        self.generation = 0
        self.running = 0  # the generation that may have living ranks
        self.unanswered: dict[int, float] = {}  # actions without outcome, since when
        self._unended = UnconfirmedStop()
        self._seq = 0
        self._at = 0.0
        self._id = 0
        self._closed = 0
        self._seats: tuple[Seat, ...] = ()
        self._seated: set[str] = set()
        self._asked: dict[int, int] = {}  # Acquire without outcome: how many
        self._stops: dict[int, int] = {}  # Stop id -> generation
        self._down: set[str] = set()  # fell silent or were released, and have not reported since
        self._phase = Phase.NEW
        self._out: frozenset[str] = frozenset()
        self._excused: set[str] = set()  # silent since the last launch, back or not, or sent away by a person

    def check_entry(self, entry: Entry, view: JobView) -> None:
        try:
            self._check_event(entry)
            for action in entry.decision.actions:
                if not isinstance(action, Say):
                    self._check_action(entry, action.id)
                    self._unended.on_action(entry.at, action, view.active)
                if isinstance(action, Acquire):
                    self._asked[action.id] = action.count
                elif isinstance(action, Launch):
                    self._check_launch(action)
                    self._check_replicas(action, view)
                    admitted = {seat.node for seat in action.seats} - (self._seated - self._out)
                    cut_off = ", ".join(sorted(admitted & view.without_links))
                    _require(not cut_off, Invariant.ADMITTED_HAS_LINKS, cut_off)
                elif isinstance(action, Stop):
                    self._stops[action.id] = action.generation
                elif isinstance(action, Dismiss):
                    self._down.add(action.node)
            self._check_nodes(view)
            self._check_refill(entry, view)
            self._check_count(entry, view)
            self._check_state(entry, view)
        except UnsafeError as e:
            raise UnsafeError(e.invariant, e.detail, _entry_place(entry)) from None

    def _check_event(self, entry: Entry) -> None:
        _require(entry.seq == self._seq + 1 and entry.at >= self._at, Invariant.ENTRIES_IN_ORDER)
        self._seq, self._at = entry.seq, entry.at
        self._unended.on_event(entry.at, entry.event)
        match entry.event:
            case Successor(lost=Lost(generation=newest)):
                self._down -= self._seated  # they are asked anew
                if newest > self.generation:  # an entry that was lost has launched it
                    self.generation, self.running = newest, newest if self.running else 0
            case Outcome(action=id):
                self.unanswered.pop(id, None)
                self._asked.pop(id, None)
                if self._stops.pop(id, 0) == self.running:
                    self.running = 0
            case Alarm(kind=Kind.SILENCE, suspects=suspects):
                self._down.update(suspects)
                self._excused.update(suspects)
            case Ready(node=node):
                self._down.discard(node)  # put back at once if the answer is to release it
            case Order(verb="evict" | "drain", node=node):
                self._excused.add(node)

    def _check_action(self, entry: Entry, id: int) -> None:
        _require(id > self._id, Invariant.ACTION_IDS_GROW, f"{id} came after {self._id}")
        self._id = id
        self.unanswered[id] = entry.at

    def _check_launch(self, launch: Launch) -> None:
        _require(launch.generation == self.generation + 1, Invariant.GENERATIONS_GROW)
        running = f"{self.running} runs when {launch.generation} is launched"
        _require(self.running == 0, Invariant.STOPPED_BEFORE_LAUNCH, running)
        self.generation = self.running = launch.generation
        self._excused.clear()
        nodes = [seat.node for seat in launch.seats]
        _require(len(nodes) == len(set(nodes)) > 0, Invariant.ONE_SEAT_PER_NODE)
        rank = 0
        for group_rank, seat in enumerate(launch.seats):
            _require((seat.group_rank, seat.first_rank) == (group_rank, rank), Invariant.RANKS_WITHOUT_GAPS)
            rank += seat.nproc
        lost = ", ".join(sorted(self._down.intersection(nodes)))
        _require(not lost, Invariant.NO_LOST_NODE, lost)

    def _check_replicas(self, launch: Launch, view: JobView) -> None:
        """Check that a job that has shrunk has ranks for whole replicas, if its parallel groups are known and all nodes
        have the same number of ranks."""
        ranks, replica = world_size(launch.seats), replica_ranks(view.mesh)
        alike = len({seat.nproc for seat in launch.seats}) == 1
        whole = ranks % replica == 0 or len(launch.seats) == view.job.max_nodes or not alike
        _require(whole, Invariant.WHOLE_REPLICAS, f"{ranks} ranks, and a replica has {replica}")

    def _check_nodes(self, view: JobView) -> None:
        if view.seats is not self._seats:
            self._seats, self._seated = view.seats, {seat.node for seat in view.seats}
        places = (view.pool.keys(), view.coming.keys(), view.gone.keys())
        elsewhere = set().union(*places)
        _require(len(elsewhere) == sum(map(len, places)), Invariant.ONE_PLACE_PER_NODE)
        _require(elsewhere & self._seated <= view.out <= self._seated, Invariant.ACTIVE_IS_NOTHING_ELSE)

    def _check_refill(self, entry: Entry, view: JobView) -> None:
        job, wake_at = view.job, entry.decision.wake_at
        if not job.can_acquire or view.phase in _OVER:
            return
        beside = {*view.pool, *view.coming, *view.under_check}
        have = len(self._seated) - len(view.out) + len(beside)
        enough = have + sum(self._asked.values()) >= job.max_nodes + job.standbys
        asks_soon = wake_at is not None and wake_at <= entry.at + LONGEST_RETRY_S
        _require(enough or asks_soon, Invariant.MISSING_IS_REQUESTED)

    def _check_count(self, entry: Entry, view: JobView) -> None:
        """Check that a job does not evict nodes that it needs, and does not give up while it has enough nodes."""
        job, event, left = view.job, entry.event, view.out - self._out
        enough = len(view.active) + len(view.pool.keys() - view.without_links) >= view.fewest_nodes
        lost = {*self._excused, *(event.failed if isinstance(event, Outcome) else ())}
        stands = view.phase is Phase.WAITING and not job.can_acquire
        _require(enough or not stands or not left or bool(left & lost), Invariant.EVICTS_REPLACEABLE, ", ".join(left))
        gives_up = any(isinstance(action, Finish) and action.code == GAVE_UP for action in entry.decision.actions)
        in_vain = gives_up and self._phase is Phase.WAITING and isinstance(event, Tick)
        _require(not (in_vain and enough), Invariant.ENOUGH_IS_ENOUGH)
        self._phase, self._out = view.phase, view.out

    def _check_state(self, entry: Entry, view: JobView) -> None:
        decision = entry.decision
        _require(decision.phase is view.phase and view.phase is not Phase.NEW, Invariant.PHASE_IS_TOLD)
        _require(view.phase is not Phase.TRAINING or not view.open_incident, Invariant.TRAINING_ENDS_INCIDENT)
        _require(view.phase is not Phase.STOPPING or bool(view.open_incident), Invariant.STOP_HAS_REASON)
        _require(view.phase not in _AWAITING or view.awaited in self.unanswered, Invariant.AWAITED_CAN_COME)
        _require(view.phase is not Phase.WAITING or decision.wake_at is not None, Invariant.WAIT_ENDS)
        _require(view.phase not in _OVER or decision.wake_at is None, Invariant.END_NEEDS_NO_CLOCK)
        if isinstance(entry.event, Tick) and decision.wake_at is not None:
            _require(decision.wake_at > entry.at, Invariant.TICK_MOVES_ON)
        if decision.closed:
            _require(decision.closed.number == self._closed + 1, Invariant.INCIDENT_CLOSED_ONCE)
            self._closed += 1


class RecoveryEffort:
    """Counts failures and progress; raises UnsafeError if the job gives up too early."""

    def __init__(self) -> None:
        self.attempts = 0
        self.wait_s = 0.0
        self.failures = 0  # since a step was made
        self.ended = ""  # how it ended, if by giving up
        self._best = -1
        self._further_s = 0.0  # for so long the job made steps that were new
        self._stops: list[tuple[float, float]] = []  # when ranks were stopped, and how long it had been by then
        self._told: Progress | None = None
        self._own_exits = 0  # before any step was made: a script that ends itself, as far as anybody can tell
        self._phase_at = 0.0
        self._phase = Phase.NEW

    def on_entry(self, entry: Entry) -> None:
        event, decision = entry.event, entry.decision
        if isinstance(event, Begin):
            self.attempts, self.wait_s = event.limits.attempts, event.limits.wait_s
        elif isinstance(event, Progress) and decision.phase is Phase.TRAINING:
            self.failures = 0
            self._on_progress(event)
        elif isinstance(event, Alarm) and event.kind is Kind.CRASH and not self._told:
            self._own_exits += event.code is not None and event.code > 0 and not event.klass
        for action in decision.actions:
            if isinstance(action, Stop):
                self.failures += 1
                self._stops.append((entry.at, self._further_s))
            elif isinstance(action, Finish) and action.code == GAVE_UP:
                self.ended = action.reason
                self._judge_end(entry)
        if decision.phase is not self._phase:
            self._phase, self._phase_at = decision.phase, entry.at

    def _on_progress(self, event: Progress) -> None:
        before = self._told.at if self._told and self._told.generation == event.generation else event.first_at
        self._told = event
        if event.step > self._best:
            self._best = event.step
            self._further_s += event.at - before

    def _judge_end(self, entry: Entry) -> None:
        waited = self._phase is Phase.WAITING and entry.at - self._phase_at >= self.wait_s - 0.001
        # Nobody may give up who makes new steps for half of the time, whatever else is done in the other half.
        stuck = sum(2 * (self._further_s - further_s) <= entry.at - at for at, further_s in self._stops)
        never_began = self._told is None and self._own_exits > 1
        if not waited and not never_began and max(self.failures, stuck) <= self.attempts:
            raise UnsafeError(Invariant.GIVES_UP_LATE, self.ended, _entry_place(entry))


def _entry_place(entry: Entry) -> str:
    return f"entry {entry.seq} at {entry.at:.3f}: "


def _require(kept: bool, invariant: Invariant, detail: str = "") -> None:
    if not kept:
        raise UnsafeError(invariant, detail)
