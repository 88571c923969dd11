"""Holdfast's policy at scale: the real decider in virtual time, with the alarms that published failures would raise."""

import msgspec

from holdfast.core.decide.decider import Decider
from holdfast.core.membership.standby_sizing import binomial_quantile
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.ledger import Ledger
from holdfast.core.record.solving_rungs import count_rungs
from holdfast.model.action import Finish, Launch, Stage
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Begin, Event, Order, OrderVerb, Ready, Tick
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.sim.scale import node_defects, node_neighbours
from holdfast.sim.scale.elastic_recovery import ElasticRecovery
from holdfast.sim.scale.failure_mixes import BlastFailure, FailureMix, FailureMode
from holdfast.sim.scale.failure_schedule import (
    FailureSchedule,
    ScaleSetup,
    ScheduledFailure,
    draw_schedule,
    draw_standby_failures,
)
from holdfast.sim.scale.failure_symptoms import silence_alarm
from holdfast.sim.scale.node_defects import NodeDefect
from holdfast.sim.scale.price_sheet import PriceSheet
from holdfast.sim.scale.scale_executor import ScaleExecutor
from holdfast.sim.scale.scale_result import ScaleResult, make_result
from holdfast.sim.scale.scale_state import ScaleState
from holdfast.sim.scale.simulated_people import SimulatedPeople
from holdfast.sim.scale.slow_jobs import SlowJobs
from holdfast.sim.scale.standby_failures import StandbyFailures
from holdfast.sim.scale.survivor_recovery import SURVIVORS, KeptRecovery, SurvivorRecovery
from holdfast.sim.scale.time_book import TRAIN, TimeBook
from holdfast.sim.scale.virtual_clock import ALWAYS

NAME = "holdfast"
_PERSON = "the simulation"
_RUNS = (Phase.LAUNCHING, Phase.STARTING, Phase.TRAINING)
_SETTLED = 30  # steps after a launch at which progress is told once more: a release has proved itself by then


def _make_recovery(name: str, state: ScaleState) -> KeptRecovery | None:
    """Return the recovery that keeps processes; None for the policy that starts new ones at every restart."""
    if name == NAME:
        return None
    return SurvivorRecovery(state) if name == SURVIVORS else ElasticRecovery(state, name)


class HoldfastPolicy:
    def __init__(self, setup: ScaleSetup, mix: FailureMix, sheet: PriceSheet, name: str = NAME) -> None:
        self.state = ScaleState(setup, mix, sheet)
        self.name = name
        self.recovery = _make_recovery(name, self.state)  # in processes that are kept
        self.state.course.survives = self.recovery is not None
        self.state.course.resizes = self.recovery is not None and self.recovery.resizes
        self.standbys = self._standby_count()
        self._deeds = ScaleExecutor(self.state, self)
        self.people = SimulatedPeople(self.state, self.give_order)
        self._slow = SlowJobs(self.state, self.people, self.give_order, self.raise_alarm)
        self._idle = StandbyFailures(self.state, self.step_decider)
        self._left: list[NodeDefect] = []  # of nodes that a job queued again gets once more
        self._lemons: set[str] = set()
        self._striking = ""
        self._want = ""  # what the next planned restart is owed to
        self._lost: set[str] = set()  # nodes that left without a word, and so without their state
        self._before: list[str] = []  # who sat where in the last generation
        self._causes: dict[int, str] = {}  # of this life's incidents
        self._wants: dict[int, str] = {}  # and of its planned restarts
        self._begin_life()

    @property
    def book(self) -> TimeBook:
        return self.state.book

    def _standby_count(self) -> int:
        if "standbys" in self.state.setup.off:
            return 0
        if self.state.setup.standbys is not None:
            return self.state.setup.standbys
        return binomial_quantile(
            self.state.setup.nodes, self.state.mix.rate if self.state.setup.rate is None else self.state.setup.rate
        )

    def _begin_life(self) -> None:
        """Begin the job, for the first time or after a person has queued it again."""
        self.state.clock.life += 1
        self._decider, self.ledger = Decider(), Ledger()
        self.state.view = self._decider.view
        self._wake_at: float | None = None
        self._seq = 0
        self._causes.clear()
        self._wants.clear()
        self.people.begin_job()

    # --- time --------------------------------------------------------------------------------------------------

    def play_job(self) -> ScaleResult:
        weather: FailureSchedule = draw_schedule(self.state.setup, self.state.mix)
        for strike in weather.strikes:
            self.state.clock.call_at(ALWAYS, strike.at, self._strike_job, strike)
        for strike in draw_standby_failures(self.state.setup, self.state.mix, self.standbys):
            self.state.clock.call_at(ALWAYS, strike.at, self._idle.strike_standby, strike)
        for number, at in enumerate(weather.updates):
            self.state.clock.call_at(ALWAYS, at, self._update_code, f"release-{number}")
        self._begin_job()
        self.state.clock.run(self.state.setup.end_at)
        self._book_spans(self.state.now)
        if self.recovery is not None:
            self.recovery.end_job()
        self.state.book.cut_at(self.state.now)
        names, stall = (self.name, self.state.mix.name), self.state.course.saving_share()
        return make_result(self.state.setup, names, self.standbys, self.state.book, self.state.tally, stall=stall)

    def _begin_job(self) -> None:
        job = Job(
            run_id=f"scale-{self.state.setup.seed}",
            min_nodes=self.recovery.least_nodes() if self.recovery else self.state.setup.nodes,
            max_nodes=self.state.setup.nodes,
            standbys=self.standbys,
            probes="probes" not in self.state.setup.off,
        )
        ask_s = 0.0 if "ask" in self.state.setup.off else self.state.setup.ask_s
        limits = Limits(ready_s=900.0, wait_s=3600.0, ask_s=ask_s, recheck_s=0.0)
        self.step_decider(Begin(job=job, limits=limits))

    def step_decider(self, event: Event) -> Decision:
        before = self.state.view.phase
        decision = self._decider.step(self.state.now, event)
        self._seq += 1
        self.ledger.add(Entry(seq=self._seq, at=self.state.now, event=event, decision=decision))
        if self.state.view.open_incident:
            self._causes.setdefault(self.state.view.open_incident, self._striking)
        if decision.phase is Phase.PAUSING and before is not Phase.PAUSING:
            self._wants[len(self.ledger.changes) + 1] = self._want or "update"
        for over in (decision.closed, decision.changed):
            if over is not None:
                self._want = ""
                self.state.tally.evicted += len(over.evicted)
                self.state.tally.standbys_used += len(over.admitted)
        self.state.tally.rolled_back += bool(decision.closed and decision.closed.rolled_back)
        self.state.tally.waits += decision.phase is Phase.WAITING and before not in (Phase.WAITING, Phase.NEW)
        for action in decision.actions:
            self._deeds.carry_out(action)
        if decision.wake_at is not None and decision.wake_at != self._wake_at:
            self.state.clock.call_at(
                self.state.clock.life, max(self.state.now, decision.wake_at), self._tick, decision.wake_at
            )
        self._wake_at = decision.wake_at
        if decision.phase is Phase.HELD and before is not Phase.HELD and self.state.view.question:
            self.people.ask_person()
        return decision

    def give_order(self, verb: OrderVerb, cause: str, node: str = "") -> None:
        self._want = cause
        self.step_decider(Order(verb=verb, who=_PERSON, node=node))

    def _tick(self, wake_at: float) -> None:
        if wake_at == self._wake_at:
            self.step_decider(Tick())

    def _book_spans(self, until: float) -> None:
        """Add the job's spans to the time book, each with the failure or change that caused the span."""
        account = self.ledger.make_account(until)
        self.state.tally.count_rungs(count_rungs(account.incidents, account.changes))
        cause = ""
        for span in account.spans:
            if span.use is not TimeUse.HOLD:  # a hold is for what the job was stopped for just before
                cause = self._causes.get(span.incident, "") or self._wants.get(span.change, "")
            self.state.book.add_piece(span.use.value if span.use.value != "train" else TRAIN, span.end_at, cause)

    # --- nodes -------------------------------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        self.state.nodes.add(name)
        if self.state.rng.random() < self.state.mix.lemons:
            self._lemons.add(name)
        if self._left:
            self.state.defects[name] = self._left.pop()
        order = int(name.removeprefix("n"))
        self.step_decider(Ready(node=name, host=name, nproc=self.state.setup.nproc, order=order))

    def remove_node(self, name: str) -> None:
        if name in self.state.dead:
            self._lost.add(name)
        for kept in (self.state.nodes, self.state.dead, self._lemons):
            kept.discard(name)
        self.state.defects.pop(name, None)

    def _seated_node(self, luck: float) -> str:
        """Return a random node that has a seat, whether it is alive or not; empty before the first launch."""
        seats = self.state.view.seats
        return seats[int(luck * len(seats))].node if seats else ""

    # --- failures ----------------------------------------------------------------------------------------------

    def _strike_job(self, strike: ScheduledFailure) -> None:
        # From here on chance is the same whatever went before, so that policies are compared in pairs.
        self.state.rng.seed(f"ours {self.state.setup.seed} {strike.at}")
        node = self._choose_victim(strike)
        if node not in self.state.nodes or node in self.state.dead:
            return
        fault = strike.fault
        self.state.tally.incidents += 1
        self.state.tally.count_failure(strike.name)
        if strike.blast:
            self._blast_nodes(strike.blast, node)
            return
        defect = node_defects.draw_defect(fault, self.state.rng)
        match strike.why:
            case "machine":
                self.state.defects[node] = defect
            case "release":
                self._bring_release(fault)
                return
            case "outside":
                self.state.away = (self.state.now + self.state.prices("away"), fault)
            case "passing" if fault.shows == "slow":
                self._slow.slow_steps(fault, self.state.prices("passes"))
                return
            case "passing":
                pass
        self._show_failure(fault, node)

    def _choose_victim(self, strike: ScheduledFailure) -> str:
        """Return the seated node to strike; some failures prefer nodes that fail often. Empty if no node is seated."""
        lemons = [seat.node for seat in self.state.view.seats if seat.node in self._lemons] if strike.lemon else []
        return lemons[int(strike.luck * len(lemons))] if lemons else self._seated_node(strike.luck)

    def _blast_nodes(self, blast: BlastFailure, node: str) -> None:
        """Kill the nodes that share a switch or rack with this one, and schedule the alarm about them."""
        around = node_neighbours.seats_around(self.state.view.seats, node, blast.nodes)
        gone = [seat.node for seat in around if seat.node in self.state.nodes]
        self.state.dead.update(gone)
        self._striking = blast.name
        self.stall_steps()
        self.state.call_later(self.state.prices("silence"), self.raise_alarm, silence_alarm(*gone), blast.name, 0)

    def _bring_release(self, fault: FailureMode) -> None:
        """Update to a release that fails; if the update is refused, put the fault into every release."""
        self._want = fault.name
        if not self._order_update(self.state.bugs.add_release(fault), now=True):
            self.state.bugs.make_lasting(fault)
            self._on_known_bug(fault)
            self._show_failure(fault, self._seated_node(self.state.rng.random()))

    def _show_failure(self, fault: FailureMode, node: str) -> None:
        """Show a failure on a node of the running generation: schedule its alarm, and stall training if need be."""
        if node not in self.state.nodes or self.state.view.phase not in _RUNS:
            return
        self._striking = fault.name
        if fault.shows == "silence":
            self.state.dead.add(node)
        held = self.state.defects.get(node)
        defect = held if held is not None and held.fault is fault else None
        if fault.shows == "slow":
            self._slow.show_slowness(fault, node, defect)
            return
        places = node_neighbours.find_place(self.state.view.seats, node, self._seated_node(self.state.rng.random()))
        sign = self.state.signs.draw_sign(fault, places, self.state.rng, defect)
        spoilt = max(0, self.state.course.current_step(self.state.now) - sign.back_steps) if sign.back_steps else 0
        if sign.stalls:
            self.stall_steps()
        if sign.named is not None:
            self.state.call_later(
                sign.named[0], self.raise_alarm, sign.named[1], fault.name, self.state.view.generation
            )
        self.state.call_later(
            sign.after_s, self.raise_alarm, sign.alarm, fault.name, self.state.view.generation, spoilt
        )

    def raise_alarm(self, alarm: Alarm, name: str, generation: int, spoilt: int = 0) -> None:
        if generation not in (0, self.state.view.generation):
            return  # its ranks were ended meanwhile
        self._striking = self.state.cried = name
        at = self.state.course.good_at(self.state.now)
        not_after = spoilt if spoilt else None
        self._report_step()
        self.step_decider(
            msgspec.structs.replace(alarm, at=at, generation=self.state.view.generation, not_after=not_after)
        )

    # --- releases and people -----------------------------------------------------------------------------------

    def _update_code(self, digest: str) -> None:
        self.state.tally.updates += 1
        if "update" in self.state.setup.off:
            self._book_spans(self.state.now)
            self._queue_again(self.state.prices("requeue") - self.state.prices("first_step"), "update")
        elif self.state.view.phase not in (Phase.NEW, Phase.DONE):  # a job that is queued has it when it begins
            self._order_update(digest, now=False)

    def _order_update(self, digest: str, *, now: bool) -> bool:
        release = Release(number=0, digest=digest, source="simulated")
        order = Order(verb="update", who=_PERSON, release=release, now=now, window_s=86400.0)
        return any(isinstance(action, Stage) for action in self.step_decider(order).actions)

    def on_finish(self, action: Finish) -> None:
        """Book the time after the job gave up, until a person has found the cause and queued the job again."""
        self._book_spans(self.state.now)
        rest_s = self.people.rest_s(self.state.cried)
        for node in self.people.mend_failure(self.state.cried):
            del self.state.defects[node]
        self.state.book.add_piece("person", self.state.now + rest_s, self.state.cried)
        self._queue_again(self.state.prices("requeue") - self.state.prices("first_step"), self.state.cried)

    def _queue_again(self, wait_s: float, cause: str) -> None:
        begin_at = max(self.state.book.at, self.state.now) + wait_s
        self.state.book.add_piece("requeue", begin_at, cause)
        self._begin_life()
        # It gets its machines again, but for those that answer no more; a slow one has been counted to its end.
        ailing = (
            d for node, d in self.state.defects.items() if node not in self.state.dead and d.fault.shows != "slow"
        )
        self._left, self.state.defects = list(ailing), {}
        for kept in (self.state.nodes, self.state.dead, self._lemons):
            kept.clear()
        self.state.begins = True
        self.state.course.on_end(self.state.now)
        self.state.clock.call_at(self.state.clock.life, begin_at, self._begin_job)

    # --- training ----------------------------------------------------------------------------------------------

    def stall_steps(self) -> None:
        self.state.course.stall_steps(self.state.now)

    def stop_steps(self) -> None:
        self.stall_steps()
        if self.state.view.phase is Phase.PAUSING:  # an incident was told of the last step before its alarm
            self._report_step()

    def on_launching(self, action: Launch) -> None:
        self.stall_steps()
        self.state.bugs.running = action.release.digest
        names = [seat.node for seat in action.seats]
        places = enumerate(zip(self._before, names, strict=False))
        lost = self._lost | self.state.dead
        dead = tuple(number for number, (was, now) in places if was != now and was in lost)
        if self.recovery is not None and self.recovery.seat_nodes(action):
            self.state.course.keep_live()
        else:
            self.state.course.choose_restore(action, dead, changed=names != self._before)
        self._before, self._lost = names, set()

    def on_started(self, action: Launch) -> None:
        if self.recovery is not None and action.keep:
            begin_s = self.recovery.resume_s()
        else:
            begin_s = self.state.prices("first_step")
            begin_s += self.state.prices("fresh") if "zygote" in self.state.setup.off else 0.0
        self.state.call_later(self.state.course.restore_s() + begin_s, self._first_step, action)

    def _first_step(self, action: Launch) -> None:
        if self.state.view.generation != action.generation or self.state.view.phase is not Phase.STARTING:
            return
        until, away = self.state.away
        if away is not None and self.state.now < until:
            self._show_failure(away, self._seated_node(self.state.rng.random()))
            return
        self.state.course.begin_steps(self.state.now)
        if self.recovery is not None:
            self.recovery.begin_steps()
        self._report_step()
        for steps in sorted({self.state.course.behind, _SETTLED} - {0}):
            self.state.call_later(steps * self.state.setup.step_s, self._report_settled, action.generation)
        bug = self.state.bugs.find_fault(action.release.digest)
        if bug is not None:
            self.state.call_later(self.state.prices("relapse"), self._fails_again, action.generation, bug)
        seated = {seat.node for seat in action.seats} if self.state.defects else set()
        for node, defect in self.state.defects.items():
            if node in seated and defect.fault.shows != "slow":  # that one never stopped dragging
                again = "corrupts" if defect.fault.shows == "loss" else "relapse"
                self.state.call_later(self.state.prices(again), self._relapse_node, action.generation, defect, node)

    def _fails_again(self, generation: int, fault: FailureMode) -> None:
        if generation == self.state.view.generation and not self.state.course.stalled:
            self._on_known_bug(fault)
            self._show_failure(fault, self._seated_node(self.state.rng.random()))

    def _relapse_node(self, generation: int, defect: NodeDefect, node: str) -> None:
        if (
            generation != self.state.view.generation
            or self.state.course.stalled
            or self.state.defects.get(node) is not defect
        ):
            return
        self._show_failure(defect.fault, node)
        self.people.page_person(node, defect)

    def _on_known_bug(self, fault: FailureMode) -> None:
        if "rollback" in self.state.setup.off:
            self.state.bugs.make_lasting(fault)
        self.people.plan_mend(fault)

    def _report_settled(self, generation: int) -> None:
        if generation == self.state.view.generation and not self.state.course.stalled:
            self._report_step()

    def _report_step(self) -> None:
        """Report the job's step, if it has made one in this generation."""
        progress = self.state.course.progress_event(self.state.now, self.state.view.generation)
        if progress is not None:
            self.step_decider(progress)
