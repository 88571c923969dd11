"""The state of a job: one plain record. The functions that handle events import it and change it. Only `emit` requests
an action. Only `enter` changes the phase: it asserts that the new phase may follow the old one, and that the invariant
of the new phase holds. Reading a property changes nothing.
"""

from holdfast.core.decide.action_ids import ActionIds
from holdfast.core.decide.launch_fence import Fence
from holdfast.core.decide.ongoing_planned_restart import Interruption, Pause
from holdfast.core.decide.pending_operator_requests import OpenRequests
from holdfast.core.decide.resume_adjustments import ResumePoint
from holdfast.core.incident.failure_history import FailureHistory
from holdfast.core.incident.full_disks import FullDisks
from holdfast.core.incident.incident_case import IncidentCase
from holdfast.core.incident.open_incident import Incident
from holdfast.core.membership.job_nodes import JobNodes
from holdfast.core.release.job_releases import JobReleases
from holdfast.model.action import Action
from holdfast.model.code_release import Release
from holdfast.model.decider_events import Begin, Progress
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm
from holdfast.model.incident_record import Change, Record, Verdict
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision

# The phases that may follow each phase. STOPPING may follow every phase with seats, because a journal that has lost
# its end may have forgotten a generation that still runs.
_NEXT: dict[Phase, tuple[Phase, ...]] = {
    Phase.NEW: (Phase.WAITING,),
    Phase.WAITING: (Phase.WAITING, Phase.LAUNCHING, Phase.HELD, Phase.STOPPING, Phase.ENDING),
    Phase.LAUNCHING: (Phase.STARTING, Phase.TRAINING, Phase.STOPPING, Phase.ENDING),
    Phase.STARTING: (Phase.TRAINING, Phase.STOPPING, Phase.PAUSING, Phase.ENDING),
    Phase.TRAINING: (Phase.STOPPING, Phase.PAUSING, Phase.ENDING),
    Phase.STOPPING: (Phase.STOPPING, Phase.PROBING, Phase.WAITING, Phase.LAUNCHING, Phase.HELD, Phase.ENDING),
    Phase.PROBING: (Phase.STOPPING, Phase.WAITING, Phase.LAUNCHING, Phase.HELD, Phase.ENDING),
    Phase.PAUSING: (Phase.STOPPING, Phase.WAITING, Phase.LAUNCHING, Phase.HELD, Phase.ENDING),
    Phase.HELD: (Phase.STOPPING, Phase.WAITING, Phase.LAUNCHING, Phase.ENDING),
    Phase.ENDING: (Phase.DONE,),
    Phase.DONE: (Phase.WAITING,),  # if it was the time of its nodes that ended it
}
# Phases that the outcome of one action ends.
_AWAITING = (Phase.LAUNCHING, Phase.STOPPING, Phase.PROBING, Phase.PAUSING, Phase.ENDING)


class JobState:
    """The state of a job. The functions of core/decide change it within a step of the decider; nobody else does."""

    def __init__(self) -> None:
        self.job = Job(run_id="", min_nodes=1, max_nodes=1)
        self.limits = Limits()
        self.phase = Phase.NEW
        self.awaited = 0  # the action whose outcome ends the phase, or ended the last one that had one
        self.generation = 0
        self.incidents = 0  # so far
        self.interruption: Interruption | None = None  # what training stands for, until the next step is made
        self.paused_for = ""  # what ranks were last ended for on purpose
        self.verdict: Verdict | None = None  # the newest on the open incident
        self.failed_survivals = 0  # launches in a row in which ranks were to go on, and that led to no step
        self.whole_in = 0  # number of ranks that each had the whole state of the running release; 0: they had not
        self.carries = False  # the state of the running release lives in its ranks: none needs restoring
        self.resizes = False  # ranks of the running release can go on among more or fewer, with the same batch
        self.case: IncidentCase | None = None  # what nodes are being tried for
        self.progress: Progress | None = None  # of this generation
        self.taken_over_at = 0.0  # by a new controller, until a rank is known to have made a step since; 0: then
        self.untold = False  # nobody has said yet how far ranks came before that
        self.standing: Alarm | None = None  # that the job stands, and for whom if somebody seems to be the reason
        self.resume_point = ResumePoint()
        self.requests = OpenRequests()
        self.ids = ActionIds()
        self._make_parts(Release(number=1))
        self.fence = Fence()
        self.full_disks = FullDisks()
        self.not_before = 0.0  # when the next generation may be launched
        self.grow_at = 0.0  # when a job that is smaller than it wants may be stopped to grow
        self.wait_until: float | None = None
        self.waits_since = 0.0  # for nodes, as far as it waits
        self.last_call_at: float | None = None  # 0: it is over
        self.exit_code: int | None = None  # None: nothing has ended the job
        self.summary = ""  # the part of the newest reason that says what the job does now
        self.begin_step()

    def begin_job(self, begin: Begin) -> None:
        """Set the job, its limits and its first release from the first event of the journal."""
        self.job, self.limits = begin.job, begin.limits
        self._make_parts(begin.release)
        self.fence = Fence(begin.fence_s, fleet_ends=begin.job.can_acquire)

    def _make_parts(self, release: Release) -> None:
        self.nodes = JobNodes(self.job, self.limits, self.ids)
        self.failures = FailureHistory(self.job, self.limits)
        self.releases = JobReleases(release, self.limits.trial_steps)

    # --- what one step decides -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Clear the decision of the last step."""
        self.actions: list[Action] = []
        self.next_move = ""  # what the job does now, as the last clause of the step's reason
        self.closed: Record | None = None
        self.changed: Change | None = None
        self.stood_since: float | None = None

    def emit(self, *actions: Action) -> None:
        """Request actions, in this order."""
        self.actions.extend(actions)

    def make_decision(self, reason: str, wake_at: float | None) -> Decision:
        # Not a field of the decision: journals that were written before must give equal decisions.
        self.summary = self.next_move or reason or self.summary
        return Decision(
            actions=tuple(self.actions),
            wake_at=wake_at,
            reason=reason,
            phase=self.phase,
            closed=self.closed,
            changed=self.changed,
            stood_since=self.stood_since,
        )

    # --- the phase -----------------------------------------------------------------------------------------------

    def enter(self, phase: Phase, awaited: int = 0) -> None:
        """Change the phase. If an action's outcome ends the new phase, `awaited` is the number of that action."""
        assert phase in _NEXT[self.phase], f"{phase} does not follow {self.phase}"
        assert bool(awaited) is (phase in _AWAITING), f"{phase} awaits {awaited or 'nothing'}"
        self.phase = phase
        self.awaited = awaited or self.awaited
        self._assert_invariant()

    def _assert_invariant(self) -> None:
        """Assert the invariant of the phase that begins. Each message says why the invariant must hold."""
        incident = self.incident
        match self.phase:
            case Phase.WAITING:
                ends = (self.wait_until, self.not_before, self.fence.until, self.nodes.links.until)
                assert any(ends), "no wait is without end"
            case Phase.LAUNCHING:
                assert not self.fence.until, "behind the fence ranks of an older generation may still train"
                assert not self.requests.held, "whoever holds a job wants no rank to run"
                assert incident is None or self.verdict is not None, "a launch carries out the verdict"
            case Phase.TRAINING:
                assert self.progress is not None, "a step proves that every rank trains"
                assert self.interruption is None, "the first step ends what training stood for"
            case Phase.STOPPING:
                assert incident is not None and not incident.judged, "ranks are stopped so that a failure can be judged"
            case Phase.PROBING:
                assert incident is not None and incident.judged, "nodes are tried when the alarms name none of them"
                assert self.case is not None, "what probes find is judged together with the case"
            case Phase.PAUSING:
                assert self.interruption is not None, "the time without training is accounted to somebody"
            case Phase.HELD:
                assert self.requests.held or self.requests.asking, "only a person keeps a job standing"
            case Phase.ENDING:
                assert self.interruption is None, "the last record is written before the job ends"

    # --- questions -----------------------------------------------------------------------------------------------

    @property
    def incident(self) -> Incident | None:
        return self.interruption if isinstance(self.interruption, Incident) else None

    @property
    def pause(self) -> Pause | None:
        return self.interruption if isinstance(self.interruption, Pause) else None

    @property
    def current_incident(self) -> Incident:
        """Return the open incident. Call this only in phases that always have one."""
        assert isinstance(self.interruption, Incident), f"{self.phase} without an incident"
        return self.interruption

    @property
    def current_case(self) -> IncidentCase:
        """Return the facts on which the ladder judges the open incident. Only phases that probe or replay have them."""
        assert self.case is not None, f"{self.phase} without a case"
        return self.case

    @property
    def current_verdict(self) -> Verdict:
        """Return the verdict on the open incident, which the current launch carries out."""
        assert self.verdict is not None, f"{self.phase} without a verdict"
        return self.verdict
