"""The whole policy of a job as one state machine: told the time and an event, it answers with actions."""

from collections.abc import Collection, Iterable
from itertools import count

from holdfast.core import story
from holdfast.core.diagnose.ladder import GAVE_UP, Case, tried
from holdfast.core.doubts import Doubts
from holdfast.core.failures import Failures
from holdfast.core.plan import next_seats, trial
from holdfast.core.standby import Standbys
from holdfast.core.triage import Incident, names_node, not_started, opened
from holdfast.model.action import Action, Finish, Launch, Say, Stop
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.event import Begin, Decision, Ended, Event, Limits, Order, Outcome, Phase, Progress, Ready, Tick
from holdfast.model.topology import Job, Seat
from holdfast.model.verdict import Record, Remedy, Verdict


class Decider:
    """State changes only inside `step`; attributes are for reading."""

    def __init__(self) -> None:
        self.job = Job(run_id="", min_nodes=1, max_nodes=1)
        self.limits = Limits()
        self.phase = Phase.NEW
        self.generation = 0
        self.seats: tuple[Seat, ...] = ()
        self.out: set[str] = set()  # seated, but not in the next generation
        self.ended: set[str] = set()  # seated, and all of their ranks have ended well
        self.incident: Incident | None = None
        self.verdict: Verdict | None = None  # the newest on the open incident
        self.failures = Failures(self.job, self.limits)
        self.progress: Progress | None = None  # of this generation
        self.incidents = 0
        self.awaited = 0  # the action whose outcome moves this phase on
        self._seated: frozenset[str] = frozenset()
        self._ids = count(1)
        self._beside(Standbys(self.job, self.limits, self._ids))
        self._back: dict[str, Ready] = {}  # silent ones that are back before they could be evicted
        self._case: Case | None = None  # what nodes are being tried for
        self._unstopped: set[str] = set()  # whose ranks could not be ended
        self._not_before = 0.0  # when the next generation may be launched
        self._wait_until: float | None = None
        self._last_call_at: float | None = None
        self._actions: list[Action] = []
        self._closed: Record | None = None
        self.doubts = Doubts()

    def _beside(self, standbys: Standbys) -> None:
        self._standbys, self.pool, self.coming = standbys, standbys.pool, standbys.coming
        self.gone, self.examined = standbys.gone, standbys.examined

    def step(self, now: float, event: Event) -> Decision:
        self._actions, self._closed = [], None
        reason = self._hear(now, event)
        if self.phase not in (Phase.ENDING, Phase.DONE):
            self._actions += self._standbys.refill(len(self.seats) - len(self.out))
        return Decision(
            actions=tuple(self._actions), wake_at=self._wake_at(), reason=reason, phase=self.phase, closed=self._closed
        )

    def _hear(self, now: float, event: Event) -> str:
        """The life of the job and of its incidents, on one screen."""
        match self.phase, event:
            case Phase.NEW, Begin():
                return self._begin(now, event)
            case (Phase.NEW, _) | (_, Begin()):
                pass  # a journal begins with a Begin and has no other
            case Phase.ENDING, Outcome(action=id) if id == self.awaited:
                self.phase = Phase.DONE
                return "done"
            case ((Phase.ENDING | Phase.DONE), _):
                return "the job is ending: no longer of interest"
            case _, Order(verb="stop"):
                grace_s = 0.0 if event.now else self.limits.shutdown_grace_s
                return self._finish(now, event.code, f"stopped by {event.who}", grace_s)
            case _, Order():
                return f"'{event.verb}' is no order that we know"
            case _, Ready():
                return self._ready(now, event)
            case _, Outcome(action=id) if id in self._standbys.acquiring:
                return self._standbys.acquired(now, event, self._active())
            case _, Outcome(action=id) if id in self.examined:
                found, actions = self._standbys.examination(event)
                self._actions += actions
                return f"{found}; {self._next_generation(now)}" if self.phase is Phase.WAITING else found
            case _, Alarm() if event.stance is not Stance.ACT:
                return self._told(event)
            case _, Alarm() if not self._concerns_generation(event):
                return self._outsider(now, event)
            case Phase.WAITING, Alarm():
                return f"{self._evict(event.suspects, event.suspects)}; {self._next_generation(now)}"
            case Phase.WAITING, Tick():
                return self._waited(now)
            case Phase.LAUNCHING, Outcome(action=id, ok=True) if id == self.awaited:
                return self._started(now, event)
            case Phase.LAUNCHING, Outcome(action=id) if id == self.awaited:
                return self._trouble(now, not_started(now, event, self.generation, self.seats))
            case ((Phase.LAUNCHING | Phase.STARTING | Phase.TRAINING), Alarm()):
                return self._trouble(now, event)
            case ((Phase.LAUNCHING | Phase.STARTING | Phase.TRAINING), Progress()):
                return self._progressed(now, event)
            case ((Phase.LAUNCHING | Phase.STARTING | Phase.TRAINING), Ended()):
                return self._node_ended(now, event)
            case Phase.STOPPING, Alarm():
                return self._noted(event)
            case Phase.STOPPING, Progress():
                return self._last_steps(now, event)
            case Phase.STOPPING, Outcome(action=id) if id == self.awaited:
                return self._stopped(now, event)
            case Phase.PROBING, Alarm():
                return self._lost_while_probing(event)
            case Phase.PROBING, Outcome(action=id) if id == self.awaited:
                return self._probed(now, event)
            case _, Tick():
                return self._look_at_coming(now)
            case _, Outcome() | Progress() | Ended():
                return ""  # of an action or a generation that is over
        raise AssertionError((self.phase, event))

    # --- nodes -------------------------------------------------------------------------------------------------

    def _begin(self, now: float, event: Begin) -> str:
        self.job, self.limits = event.job, event.limits
        self._beside(Standbys(self.job, self.limits, self._ids))
        self.failures = Failures(self.job, self.limits)
        return self._wait(now)

    def _active(self) -> set[str]:
        return set(self._seated - self.out)

    def _ready(self, now: float, event: Ready) -> str:
        if event.node in self._seated and event.node not in self.out:
            if self.phase in (Phase.STOPPING, Phase.PROBING):
                self._back[event.node] = event
            return f"{event.node} is back"
        self._actions += self._standbys.ready(event)
        if event.node not in self.pool:
            return f"{event.node} had left the job before: not taken back"
        if self.phase is Phase.WAITING:
            return self._next_generation(now)
        return f"{event.node} is ready as a standby"

    def _told(self, alarm: Alarm) -> str:
        """Naming is cheap: a person may hear of it, nobody is stopped for it."""
        if alarm.stance is Stance.NOTIFY:
            self._actions.append(Say(text=story.cause(alarm)))
        return f"{alarm.kind} ({alarm.stance}): {story.cause(alarm)}"

    def _concerns_generation(self, alarm: Alarm) -> bool:
        if alarm.kind is Kind.SILENCE or (names_node(alarm) and self.phase is not Phase.WAITING):
            return not (self._active() - self.ended).isdisjoint(alarm.suspects)
        return alarm.generation == self.generation and self.phase is not Phase.WAITING

    def _outsider(self, now: float, alarm: Alarm) -> str:
        """News of a standby, of a node still coming or done with its work, or of a generation that is over."""
        if alarm.kind is not Kind.SILENCE and not names_node(alarm):
            return ""
        lost = self._standbys.lost(alarm.suspects)
        for node in lost:
            self._actions += self._standbys.release(node, alarm.kind, story.lost_standby(alarm))
        if lost:
            waiting = f"; {self._next_generation(now)}" if self.phase is Phase.WAITING else ""
            return f"standby {', '.join(lost)} lost: {alarm.reason}{waiting}"
        finished = self.ended.intersection(alarm.suspects)
        return f"{self._evict(finished, finished)} after its ranks had ended well" if finished else ""

    def _evict(self, nodes: Iterable[str], silent: Collection[str]) -> str:
        leaving = sorted(self._active().intersection(nodes))
        self.out.update(leaving)
        if self.incident:
            self.incident.evicted += tuple(leaving)
        for node in leaving:
            kind, answers = Kind.SILENCE if node in silent else Kind.CRASH, node not in self._unstopped
            released = self._standbys.evict(node, kind, self.generation, answers=answers)
            self._actions += released
            if not released and node in self._back:
                self._standbys.ready(self._back[node])
        return f"evicted {', '.join(leaving)}"

    def _look_at_coming(self, now: float) -> str:
        late = self._standbys.tick(now)
        self._actions += late
        return f"{', '.join(action.node for action in late)} never became ready" if late else ""

    def _waited(self, now: float) -> str:
        late = self._look_at_coming(now)
        reason = self._next_generation(now)
        if self.phase is not Phase.WAITING or self._wait_until is None or now < self._wait_until:
            return f"{late}; {reason}" if late else reason
        short = f"{self._have()} of {self.job.min_nodes} nodes after {self.limits.wait_s:g} s"
        return self._finish(now, GAVE_UP, f"not enough nodes: {short}; start more nodes or lower --nnodes")

    def _have(self) -> int:
        return len(self.seats) - len(self.out) + len(self.pool)

    # --- a generation ------------------------------------------------------------------------------------------

    def _next_generation(self, now: float) -> str:
        """Launch if the nodes are there, else wait for what is missing."""
        # The first generation leaves torchrun's last call open for more nodes; a recovery does not wait for them.
        if now < self._not_before:
            self.phase = Phase.WAITING
            return f"waiting for {self._not_before - now:.0f} s"
        self._not_before = 0.0
        called = any(at is not None and at <= now for at in (self._last_call_at, self._wait_until))
        may_shrink = self.generation > 0 or called
        if self._have() < (self.job.min_nodes if may_shrink else self.job.max_nodes):
            return self._wait(now)
        seats = next_seats(self.job, self.seats, self.out, self.pool, may_shrink)
        assert seats is not None, "enough nodes, yet no seats"
        if self.incident:
            kept = self._active()
            self.incident.admitted += tuple(s.node for s in seats if s.node not in kept)
        for seat in seats:
            self.pool.pop(seat.node, None)
        self.seats, self._seated = seats, frozenset(s.node for s in seats)
        self.out, self.ended, self.progress = set(), set(), None
        self.generation += 1
        self.phase, self._wait_until, self._last_call_at = Phase.LAUNCHING, None, None
        self.awaited = next(self._ids)
        launch = Launch(
            id=self.awaited,
            generation=self.generation,
            seats=seats,
            doubts=self.doubts.all,
            not_after=self.doubts.not_after,
            verified=self.doubts.verified,
        )
        self._actions.append(launch)
        return f"launching generation {self.generation} on {', '.join(s.node for s in seats)}"

    def _wait(self, now: float) -> str:
        self.phase = Phase.WAITING
        if self._wait_until is None:
            self._wait_until = now + self.limits.wait_s
        if self._have() < self.job.min_nodes:
            self._last_call_at = None
        elif self._last_call_at is None:
            self._last_call_at = now + self.limits.last_call_s
        return f"waiting for nodes: {self._have()} of {self.job.max_nodes}"

    def _started(self, now: float, event: Outcome) -> str:
        self.phase = Phase.STARTING
        if self.incident:
            self.incident.launched_at = now
        return f"generation {self.generation} started" + (f", {event.detail}" if event.detail else "")

    def _progressed(self, now: float, event: Progress) -> str:
        if event.generation != self.generation:
            return ""
        self.progress = event
        self.failures.gets_further(now, event)
        if self.phase is Phase.TRAINING:
            return ""
        self.phase = Phase.TRAINING
        self.doubts.settle()
        if self.incident is None or self.verdict is None:
            return f"training, first step after {event.first_step - 1} done" if not event.counted else "training"
        resumed_from = None if event.counted or self.incident.counted else event.first_step - 1
        return self._close(self.verdict, event.first_at, resumed_from)

    def _node_ended(self, now: float, event: Ended) -> str:
        if event.generation != self.generation:
            return ""
        self.ended.add(event.node)
        if not self._active() <= self.ended:
            return f"all ranks of {event.node} ended well"
        if self.verdict is not None:  # its ranks had nothing left to do: that, too, is recovery
            self._close(self.verdict, now)
        return self._finish(now, 0, "all ranks ended well")

    # --- an incident -------------------------------------------------------------------------------------------

    def _trouble(self, now: float, alarm: Alarm) -> str:
        """Open an incident, or go on with the one that was being mended, and stop every rank at once."""
        if self.incident is None:
            self.incidents += 1
            self.incident = opened(now, self.incidents, self.generation, self.progress, alarm)
        else:
            self.incident.next_round()
        self.incident.hear(alarm)
        self.ended, lost = set(), {*self.incident.silent, *self.out}
        self.phase, self.awaited = Phase.STOPPING, next(self._ids)
        grace_s, nodes = self.limits.stop_grace_s, tuple(s.node for s in self.seats if s.node not in lost)
        self._actions.append(Stop(id=self.awaited, generation=self.generation, nodes=nodes, grace_s=grace_s))
        return f"incident {self.incident.number}: {story.cause(alarm)}"

    def _noted(self, alarm: Alarm) -> str:
        assert self.incident is not None
        self.incident.hear(alarm)
        self._back = {node: ready for node, ready in self._back.items() if node not in alarm.suspects}
        return f"incident {self.incident.number}: noted while stopping: {story.cause(alarm)}"

    def _last_steps(self, now: float, event: Progress) -> str:
        """Steps made before the alarm, told after it."""
        assert self.incident is not None
        if event.generation == self.generation and self.incident.stepped(event):
            self.failures.gets_further(now, event)
        return ""

    def _stopped(self, now: float, event: Outcome) -> str:
        """Every rank is down and all last words are in: now judge."""
        incident = self.incident
        assert incident is not None
        incident.stopped_at = now
        silent = set(incident.silent)
        cause = incident.name_cause()
        if cause.not_after is not None:
            incident.good_step = min(incident.good_step, cause.not_after)
            self.doubts.arise(self.generation, cause.not_after, self.progress)
            self.failures.spoilt(cause.not_after)
        replaceable = self._can_do_without(cause.suspects)
        case = self.failures.case(now, incident, cause, standbys=len(self.pool), replaceable=replaceable)
        verdict = self.failures.judged(now, case, silent.union(event.failed))
        self._unstopped = set(event.failed)
        if verdict.remedy in (Remedy.PROBE, Remedy.REPLAY):
            return self._try_nodes(case, verdict)
        return self._treat(now, verdict, silent)

    def _can_do_without(self, nodes: Iterable[str]) -> bool:
        left = self._active().difference(nodes)
        return bool(left) and (self.job.can_acquire or len(left) + len(self.pool) >= self.job.min_nodes)

    def _treat(self, now: float, verdict: Verdict, silent: Collection[str]) -> str:
        """Do as the verdict says."""
        incident = self.incident
        assert incident is not None
        if verdict.remedy is Remedy.GIVE_UP:
            cause = story.cause(incident.alarms[0])
            self._close(verdict, now)
            return self._finish(now, verdict.code, f"{cause}; {verdict.reason}")
        self.verdict = verdict
        self.failures.restarts += verdict.remedy is Remedy.RESTART
        self._not_before = now + verdict.wait_s if verdict.wait_s else 0.0
        self._evict(verdict.nodes, silent)
        self._back = {}
        return f"incident {incident.number}: {verdict.reason}; {self._next_generation(now)}"

    # --- trying nodes while the job stands ---------------------------------------------------------------------

    def _try_nodes(self, case: Case, verdict: Verdict) -> str:
        self._case, self.phase, self.awaited = case, Phase.PROBING, next(self._ids)
        seats = tuple(seat for seat in self.seats if seat.node not in self.out)
        action = trial(self.awaited, self.generation, seats, verdict, self.doubts.not_after)
        said = Say(text=f"{story.cause(case.cause)}: {verdict.reason}")
        self._actions += [action, said] if verdict.level else [action]
        return verdict.reason

    def _lost_while_probing(self, alarm: Alarm) -> str:
        assert self.incident is not None
        if alarm.kind is Kind.SILENCE or names_node(alarm):
            self.incident.lost |= dict.fromkeys(alarm.suspects, alarm)
            self._back = {node: ready for node, ready in self._back.items() if node not in alarm.suspects}
        return f"noted while nodes are tried: {story.cause(alarm)}"

    def _probed(self, now: float, event: Outcome) -> str:
        """Whoever was found bad, or was lost meanwhile, is evicted; if it is nobody, the next rung."""
        incident, case = self.incident, self._case
        assert incident is not None and case is not None
        incident.probed_s, self._case = now - incident.stopped_at, None
        silent = {node for node, alarm in incident.lost.items() if alarm.kind is Kind.SILENCE}
        why = {node: alarm.reason for node, alarm in incident.lost.items()} | event.failed
        bad = {node: why[node] for node in sorted(self._active().intersection(why))}
        verdict = tried(case, bad, event.detail, replaceable=bool(silent) or self._can_do_without(bad))
        incident.lost = {}
        return self._treat(now, verdict, silent)

    def _close(self, verdict: Verdict, resumed_at: float, resumed_from: int | None = None) -> str:
        assert self.incident is not None
        self._closed = self.incident.record(verdict, resumed_at, resumed_from)
        if verdict.remedy is not Remedy.GIVE_UP:
            self._actions.append(Say(text=self._closed.sentence))
        self.incident, self.verdict = None, None
        return self._closed.sentence

    # --- the end -----------------------------------------------------------------------------------------------

    def _finish(self, now: float, code: int, reason: str, grace_s: float | None = None) -> str:
        if self.incident is not None:  # it ends with the job, and its record says so
            self._close(Verdict(remedy=Remedy.GIVE_UP, code=code, reason=reason), now)
        grace_s = self.limits.stop_grace_s if grace_s is None else grace_s
        self.phase, self.awaited = Phase.ENDING, next(self._ids)
        self._actions.append(Finish(id=self.awaited, code=code, grace_s=grace_s, reason=reason))
        return reason

    def _wake_at(self) -> float | None:
        if self.phase in (Phase.ENDING, Phase.DONE):
            return None
        waits = [self._standbys.wake_at()]
        if self.phase is Phase.WAITING:
            waits += [self._wait_until, self._last_call_at, self._not_before or None]
        return min((at for at in waits if at is not None), default=None)
