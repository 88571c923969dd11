"""What has failed so far, and how far the job has come in between: all that the ladder looks at."""

from collections import deque

from holdfast.core import story
from holdfast.core.diagnose.ladder import Case, Past, judge
from holdfast.core.triage import Incident
from holdfast.model.alarm import Alarm
from holdfast.model.event import Limits, Progress
from holdfast.model.topology import Job
from holdfast.model.verdict import Remedy, Verdict

_REMEMBERED = 256
_HOUR_S = 3600.0
_LEAST_EVICTIONS, _SHARE = 8, 4  # within an hour: so many, or one in so many nodes


class Failures:
    """Part of the decider's state."""

    def __init__(self, job: Job, limits: Limits) -> None:
        self.job = job
        self.limits = limits
        self.past: list[Past] = []
        self.restarts = 0
        self.ever = False  # a step was made
        self.best = -1  # furthest step told by the script
        self._reached: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)  # such steps, and when
        self._evicted_at: deque[float] = deque()  # nodes, on evidence short of proof

    def gets_further(self, now: float, event: Progress) -> None:
        self.ever = True
        if not event.counted and event.step > self.best:
            self.best = event.step
            self._reached.append((event.step, now))

    def spoilt(self, not_after: int) -> None:
        """Steps after this one led nowhere, as it turns out; to make them again is not to get further either."""
        while self._reached and self._reached[-1][0] > not_after:
            self._reached.pop()

    def case(self, now: float, incident: Incident, cause: Alarm, *, standbys: int, replaceable: bool) -> Case:
        past = tuple(p for p in self.past if p.signature == cause.signature)
        return Case(
            cause=cause,
            step=incident.good_step,
            counted=incident.counted,
            ever=self.ever,
            past=past,
            since=now - self.limits.window_s,
            further_at=self._reached[-1][1] if self._reached else 0.0,
            rounds=incident.rounds - 1,
            attempts=self.limits.attempts,
            restarts=self.restarts,
            max_restarts=self.job.max_restarts,
            standbys=standbys,
            replaceable=replaceable,
            may_probe=self.job.probes,
            may_replay=self.job.replays,
            may_evict=self._may_evict(now),
        )

    def judged(self, now: float, case: Case, lost: set[str]) -> Verdict:
        """The verdict; nodes that did not answer go in any case. From now on the failure is one of the past."""
        cause, verdict = case.cause, judge(case)
        if lost - set(verdict.nodes) and verdict.remedy is not Remedy.GIVE_UP:
            reason = f"{story.cause(cause)}; {', '.join(sorted(lost))} did not answer: evicted"
            verdict = Verdict(remedy=Remedy.EVICT, nodes=tuple(sorted(lost.union(verdict.nodes))), reason=reason)
        elif verdict.remedy is Remedy.EVICT and case.is_guess:
            self._evicted_at.extend([now] * len(verdict.nodes))
        failure = Past(
            signature=cause.signature,
            nodes=cause.suspects,
            at=now,
            step=case.step,
            counted=case.counted,
            probed=verdict.remedy is Remedy.PROBE,
            replayed=verdict.remedy is Remedy.REPLAY,
        )
        self.past = [*self.past, failure][-_REMEMBERED:]
        return verdict

    def _may_evict(self, now: float) -> int:
        while self._evicted_at and self._evicted_at[0] <= now - _HOUR_S:
            self._evicted_at.popleft()
        most = self.limits.evictions or max(_LEAST_EVICTIONS, self.job.max_nodes // _SHARE)
        return max(0, most - len(self._evicted_at))
