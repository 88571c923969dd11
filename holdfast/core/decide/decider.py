"""The policy of a job as one state machine: each step takes the time and an event and returns a decision."""

from holdfast.core.decide import controller_takeover, launching, planned_restart, recovery
from holdfast.core.decide.controller_takeover import ActionIds
from holdfast.core.decide.launch_fence import Fence
from holdfast.core.decide.operator_requests import OperatorRequests, Pause
from holdfast.core.decide.resume_point import ResumePoint
from holdfast.core.incident.failure_history import FailureHistory
from holdfast.core.incident.first_cause import Incident, launch_alarm
from holdfast.core.incident.ladder_case import IncidentCase
from holdfast.core.membership.job_nodes import JobNodes
from holdfast.core.release.job_releases import JobReleases
from holdfast.model.action import Action
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.event import (
    Begin,
    Decision,
    Ended,
    Event,
    Limits,
    Order,
    Outcome,
    Phase,
    Progress,
    Ready,
    Successor,
    Tick,
)
from holdfast.model.incident_record import Change, Record, Verdict
from holdfast.model.job_seats import Job, Seat
from holdfast.model.release import Release


class Decider:
    """The state of a job's policy. Only `step` changes it; other code may read the attributes."""

    def __init__(self) -> None:
        self.job = Job(run_id="", min_nodes=1, max_nodes=1)
        self.limits = Limits()
        self.phase = Phase.NEW
        self.generation = 0
        self.incident: Incident | None = None
        self.verdict: Verdict | None = None  # the newest on the open incident
        self.pause: Pause | None = None  # a restart that is wanted
        self.progress: Progress | None = None  # of this generation
        self.named: Alarm | None = None  # whom the others wait for, as it seems
        self.incidents = 0
        self.awaited = 0  # the action whose outcome moves this phase on
        self.course = ResumePoint()
        self.people = OperatorRequests()
        self.ids = ActionIds()
        self.reset_parts(Release(number=1))
        self.case: IncidentCase | None = None  # what nodes are being tried for
        self.fence = Fence()
        self.not_before = 0.0  # when the next generation may be launched
        self.grow_at = 0.0  # when a job that is smaller than it wants may be stopped to grow
        self.wait_until: float | None = None
        self.last_call_at: float | None = None
        self.actions: list[Action] = []
        self.closed: Record | None = None
        self.changed: Change | None = None
        self.stood_since: float | None = None

    def reset_parts(self, release: Release) -> None:
        self.nodes = JobNodes(self.job, self.limits, self.ids)
        self.failures = FailureHistory(self.job, self.limits)
        self.releases = JobReleases(release, self.limits.trial_steps)

    @property
    def seats(self) -> tuple[Seat, ...]:
        return self.nodes.seats

    @property
    def out(self) -> set[str]:
        return self.nodes.out

    @property
    def pool(self) -> dict[str, Ready]:
        return self.nodes.pool

    @property
    def coming(self) -> dict[str, float]:
        return self.nodes.standbys.coming

    @property
    def gone(self) -> dict[str, Kind | None]:
        return self.nodes.standbys.gone

    @property
    def examined(self) -> dict[int, str]:
        return self.nodes.standbys.examined

    @property
    def under_probe(self) -> set[str]:
        return self.nodes.standbys.under_probe

    @property
    def checking(self) -> dict[int, str]:
        return self.nodes.standbys.checking

    def step(self, now: float, event: Event) -> Decision:
        self.actions, self.closed, self.changed, self.stood_since = [], None, None, None
        reason = self._dispatch(now, event)
        if self.phase in (Phase.STARTING, Phase.TRAINING):
            reason = "; ".join(part for part in (reason, planned_restart.start_if_wanted(self, now)) if part)
        if self.phase not in (Phase.ENDING, Phase.DONE):
            staying = len(self.seats) - len(self.out) - len(self.people.draining)  # those need somebody in their place
            self.actions += self.nodes.standbys.request_missing(staying)
        if self.phase in (Phase.TRAINING, Phase.WAITING):
            self.actions += self.nodes.standbys.examine_evicted()
        if self.phase is Phase.TRAINING:
            self.actions += self.nodes.standbys.recheck_due(now)
        self.fence.watch_dismissals(self.actions)
        return Decision(
            actions=tuple(self.actions),
            wake_at=self._wake_at(),
            reason=reason,
            phase=self.phase,
            closed=self.closed,
            changed=self.changed,
            stood_since=self.stood_since,
        )

    def _dispatch(self, now: float, event: Event) -> str:
        """Pass the event to the function for the current phase, and return the reason for what it decided."""
        match self.phase, event:
            case Phase.NEW, Begin():
                return launching.on_begin(self, now, event)
            case (Phase.NEW, _) | (_, Begin()):
                pass  # a journal begins with a Begin and has no other
            case _, Successor():
                return controller_takeover.on_successor(self, now, event)
            case Phase.ENDING, Outcome(action=id) if id == self.awaited:
                self.phase = Phase.DONE
                return "done"
            case ((Phase.ENDING | Phase.DONE), _):
                return "the job is ending: no longer of interest"
            case _, Order(verb="stop"):
                grace_s = 0.0 if event.now else self.limits.shutdown_grace_s
                return launching.finish_job(self, now, event.code, f"stopped by {event.who}", grace_s)
            case _, Order():
                return planned_restart.on_order(self, now, event)
            case _, Ready():
                return launching.on_ready(self, now, event)
            case _, Outcome(action=id) if id in self.nodes.standbys.acquiring:
                return self.nodes.standbys.on_acquired(now, event, self.nodes.active)
            case _, Outcome(action=id) if self.fence.awaits_outcome(id):
                return launching.on_dismissed(self, now, event)
            case _, Outcome(action=id) if id in self.examined:
                return launching.on_side_probe(self, now, self.nodes.standbys.on_examined(now, event))
            case _, Outcome(action=id) if id in self.checking:
                return launching.on_side_probe(self, now, self.nodes.standbys.on_checked(now, event))
            case _, Outcome(action=id) if id in self.releases.staging:
                reason, actions = self.releases.on_staged(now, event, self.nodes.active)
                self.actions += actions
                return reason
            case _, Alarm() if event.stance is not Stance.ACT:
                return launching.tell_alarm(self, event)
            case _, Alarm(kind=Kind.SLOW) if why := recovery.tolerates_slowness(self, now, event):
                return launching.tell_alarm(self, event, f"; not acted on, as {why}")
            case _, Alarm() if not launching.concerns_generation(self, event):
                return launching.on_outside_alarm(self, now, event)
            case Phase.WAITING, Alarm():
                evicted = launching.evict_nodes(self, now, event.suspects, event.suspects)
                return f"{evicted}; {launching.launch_or_wait(self, now)}"
            case Phase.HELD, Alarm():
                return launching.evict_nodes(self, now, event.suspects, event.suspects)
            case Phase.WAITING, Tick():
                return launching.on_wait_tick(self, now)
            case Phase.HELD, Tick():
                return planned_restart.on_held_tick(self, now)
            case Phase.LAUNCHING, Outcome(action=id, ok=True) if id == self.awaited:
                return launching.on_started(self, now, event)
            case Phase.LAUNCHING, Outcome(action=id) if id == self.awaited:
                return recovery.open_trouble(self, now, launch_alarm(now, event, self.generation, self.seats))
            case ((Phase.LAUNCHING | Phase.STARTING | Phase.TRAINING), Alarm()):
                return recovery.open_trouble(self, now, event)
            case ((Phase.LAUNCHING | Phase.STARTING | Phase.TRAINING), Progress()):
                return launching.on_progress(self, now, event)
            case ((Phase.LAUNCHING | Phase.STARTING | Phase.TRAINING), Ended()):
                return launching.on_node_ended(self, now, event)
            case Phase.PAUSING, Alarm():
                return planned_restart.on_alarm_in_pause(self, now, event)
            case ((Phase.STOPPING | Phase.PAUSING), Progress()):
                return recovery.on_last_steps(self, event)
            case Phase.PAUSING, Outcome(action=id) if id == self.awaited:
                return planned_restart.on_paused(self, now, event)
            case Phase.STOPPING, Alarm():
                return recovery.on_more_alarms(self, event)
            case Phase.STOPPING, Outcome(action=id) if id == self.awaited:
                return recovery.on_stopped(self, now, event)
            case Phase.PROBING, Alarm():
                return recovery.on_alarm_in_probe(self, event)
            case Phase.PROBING, Outcome(action=id) if id == self.awaited:
                return recovery.on_probed(self, now, event)
            case _, Tick():
                return launching.drop_late_nodes(self, now)
            case _, Outcome() | Progress() | Ended():
                return ""  # of an action or a generation that is over
        raise AssertionError((self.phase, event))

    def _wake_at(self) -> float | None:
        if self.phase in (Phase.ENDING, Phase.DONE):
            return None
        steady, standing = self.phase is Phase.TRAINING, self.phase is Phase.WAITING
        waits = [self.nodes.standbys.wake_at(steady=steady, standing=standing)]
        if self.people.asking and not self.people.held:
            waits.append(self.people.asks_until)
        if self.phase in (Phase.STARTING, Phase.TRAINING):
            waits.append(self.releases.wake_at())
        if self.phase is Phase.TRAINING and self.nodes.may_grow:
            waits.append(self.grow_at)
        if self.phase is Phase.WAITING:
            waits += [self.wait_until, self.last_call_at, self.not_before or None, self.fence.until or None]
        return min((at for at in waits if at is not None), default=None)
