"""Past failures and the progress between them: the facts from which an incident is judged."""

from collections import deque

import msgspec

from holdfast.core.incident import incident_text
from holdfast.core.incident.first_cause import is_told_elsewhere
from holdfast.core.incident.full_disk_remedy import replace_ended_nodes
from holdfast.core.incident.incident_case import IncidentCase, PastFailure
from holdfast.core.incident.ladder import find_verdict
from holdfast.core.incident.open_incident import Incident
from holdfast.core.membership.job_nodes import JobNodes
from holdfast.core.release.job_releases import JobReleases
from holdfast.model.decider_events import Progress
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Remedy, Verdict
from holdfast.model.job_and_seats import Job

_REMEMBERED = 256
_HOUR_S = 3600.0
_LEAST_EVICTIONS, _SHARE = 8, 4  # within an hour: so many, or one in so many nodes
_LEAST_LOST = 16  # the same on whatever evidence: so many, or as many as the job has


class FailureHistory:
    """Past failures, time trained and time lost, as part of the job's state."""

    def __init__(self, job: Job, limits: Limits) -> None:
        self.job = job
        self.limits = limits
        self.past: list[PastFailure] = []
        self.restarts = 0
        self.ever = False  # a step was made
        self.best = -1  # furthest step told by the script
        self.trained_s = 0.0  # time in which the job got further
        self.lost_s = 0.0  # to recoveries, and to steps made again
        self._told: Progress | None = None
        self._reached: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)  # such steps; `trained_s` before each
        self._guessed_at: deque[float] = deque()  # nodes that were evicted on evidence short of proof
        self._evicted_at: deque[float] = deque()  # and all that were
        self.skippable = False  # the script asks which batches to leave out
        self.backed = False  # copies of all states are on peers
        self._lone = False  # some of them on one peer, though two are to have them
        self._got_further = False  # since the fleet last took all nodes away
        self._fruitless_ends = 0  # in a row: the fleet took all nodes away, and the job had not got further

    def on_progress(self, event: Progress) -> None:
        self.ever, self.skippable, self.backed, self._lone = True, event.skippable, event.backed, event.lone
        told, self._told = self._told, event
        since = told.at if told and told.generation == event.generation else event.first_at
        took_s = max(0.0, event.at - since)
        if event.renumbers(told):
            self.best = -1
        if not event.counted and event.step <= self.best:
            self.lost_s += took_s
            return
        self._got_further = True
        if not event.counted:
            self.best = event.step
            self._reached.append((event.step, self.trained_s))
        self.trained_s += took_s

    def on_recovered(self, took_s: float) -> None:
        self.lost_s += max(0.0, took_s)

    def discount_steps(self, not_after: int) -> None:
        """Stop counting steps after `not_after` as progress, because they led to a bad state."""
        while self._reached and self._reached[-1][0] > not_after:
            after_s, (step, before_s) = self.trained_s, self._reached.pop()
            came_from = self._reached[-1][0] if self._reached else step
            good = (not_after - came_from) / (step - came_from) if came_from < not_after else 0.0
            self.trained_s = before_s + good * (after_s - before_s)
            if good:  # progress is told now and then, and a part of it may be good
                self._reached.append((not_after, before_s))

    def count_evictions(self, now: float, nodes: int) -> None:
        self._evicted_at.extend([now] * nodes)

    def count_fruitless_end(self) -> int:
        """Record that the fleet takes all nodes away. Return 0 if the job made a new step since the previous such end;
        otherwise return one more than the previous call did."""
        self._fruitless_ends = 0 if self._got_further else self._fruitless_ends + 1
        self._got_further = False
        return self._fruitless_ends

    def forgive_all(self) -> None:
        """Forget past failures and restarts, because a person has approved going on."""
        self.past, self.restarts, self._fruitless_ends = [], 0, 0

    def make_case(
        self, now: float, incident: Incident, releases: JobReleases, *, nodes: JobNodes, lost: set[str]
    ) -> IncidentCase:
        """Return all facts that the ladder needs about an incident; `lost` are nodes that did not answer."""
        cause = incident.alarms[0]
        several = self.backed and len(lost.union(cause.suspects)) > 1
        past = tuple(p for p in self.past if p.signature == cause.signature)
        together = incident.silent_together(nodes.hosts) if cause.kind is Kind.SILENCE else ()
        return IncidentCase(
            cause=cause,
            step=incident.good_step,
            trusted_step=incident.trusted_step,
            counted=incident.counted,
            ever=self.ever,
            past=past,
            since=now - self.limits.window_s,
            trained_s=self.trained_s,
            lost_s=self.lost_s,
            rounds=incident.rounds - 1 - incident.forgiven,
            attempts=self.limits.attempts,
            luckless=sum(self.trained_s - p.trained_s < self.lost_s - p.lost_s for p in self.past),
            restarts=self.restarts,
            max_restarts=self.job.max_restarts,
            nodes=self.job.max_nodes,
            standbys=len(nodes.usable_pool.keys() - set(cause.suspects)),
            seated=tuple(sorted(nodes.active.intersection(cause.suspects))),
            together=together,
            place=nodes.shared_place(together),
            checking=tuple(sorted(nodes.standbys.awaiting_checks)),
            replaceable=nodes.can_do_without(cause.suspects),
            near=nodes.nodes_of_ranks(cause.ranks),
            lost=tuple(sorted(lost)),
            bonds=nodes.copy_bonds(lone=self._lone) if several else {},
            may_probe=self.job.probes,
            may_replay=self.job.replays,
            may_evict=self._evictions_left(now),
            may_lose=self._losses_left(now),
            release=releases.running.number,
            back_to=releases.previous_release.number if releases.previous_release and releases.is_suspect(now) else 0,
            trial=releases.on_trial,
            mixed=releases.mixed,
            update=releases.waiting is not None,
            skippable=self.skippable,
            departed=cause in incident.departures,
            elsewhere=is_told_elsewhere(cause, incident.alarms),
        )

    def judge_case(self, now: float, case: IncidentCase) -> Verdict:
        """Return the verdict on a failure and record it. Nodes without an answer are evicted, unless the job gives
        up."""
        cause, verdict, lost = case.cause, replace_ended_nodes(case) or find_verdict(case), set(case.lost)
        if verdict.remedy is Remedy.EVICT and case.is_guess:
            self._guessed_at.extend([now] * len(verdict.nodes))
            verdict = msgspec.structs.replace(verdict, guess=True)
        if lost - set(verdict.nodes) and verdict.remedy is not Remedy.GIVE_UP:
            verdict = _add_lost_nodes(verdict, cause, lost)
        failure = PastFailure(
            signature=cause.signature,
            nodes=cause.suspects,
            at=now,
            step=case.step,
            counted=case.counted,
            release=case.release,
            trained_s=case.trained_s,
            lost_s=case.lost_s,
            probed=verdict.remedy is Remedy.PROBE,
            rolled=verdict.remedy is Remedy.ROLLBACK,
            evicted=verdict.remedy is Remedy.EVICT,
            ranks=cause.ranks,
            replayed=verdict.remedy is Remedy.REPLAY,
            hard=cause.hard,
            reason=cause.reason,
        )
        self.past = [*self.past, failure][-_REMEMBERED:]
        return verdict

    def _evictions_left(self, now: float) -> int:
        most = self.limits.evictions or max(_LEAST_EVICTIONS, self.job.max_nodes // _SHARE)
        return max(0, most - _count_last_hour(self._guessed_at, now))

    def _losses_left(self, now: float) -> int:
        return max(0, max(_LEAST_LOST, self.job.max_nodes) - _count_last_hour(self._evicted_at, now))


def _count_last_hour(times: deque[float], now: float) -> int:
    while times and times[0] <= now - _HOUR_S:
        times.popleft()
    return len(times)


def _add_lost_nodes(verdict: Verdict, cause: Alarm, lost: set[str]) -> Verdict:
    """Return the verdict with the lost nodes evicted as well. Their eviction replaces a restart, probe or replay."""
    if verdict.remedy in (Remedy.RESTART, Remedy.PROBE, Remedy.REPLAY):
        reason = f"{incident_text.describe_cause(cause)}; {', '.join(sorted(lost))} did not answer: evicted"
        return Verdict(remedy=Remedy.EVICT, nodes=tuple(sorted(lost)), reason=reason)
    reason = f"{verdict.reason}; {', '.join(sorted(lost))} did not answer: evicted too"
    return msgspec.structs.replace(verdict, nodes=tuple(sorted(lost.union(verdict.nodes))), reason=reason)
