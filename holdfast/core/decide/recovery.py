"""The course of an incident from first alarm to remedy: stop, judge, probe nodes if needed, and go on."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from holdfast.core.decide import launching
from holdfast.core.incident import incident_text
from holdfast.core.incident.first_cause import Incident, is_node_proof, open_incident
from holdfast.core.incident.ladder import GAVE_UP, find_verdict, verdict_after_probe
from holdfast.core.incident.ladder_case import IncidentCase
from holdfast.core.membership.seating import make_probe_or_replay
from holdfast.model.action import Say, Stop
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.event import Outcome, Phase, Progress
from holdfast.model.incident_record import Remedy, Verdict

if TYPE_CHECKING:
    from holdfast.core.decide.decider import Decider


def open_trouble(d: "Decider", now: float, alarm: Alarm) -> str:
    """Open an incident, or start the next round of the open one, and stop every rank at once."""
    if d.incident is None:
        d.incidents += 1
        d.incident = open_incident(now, d.incidents, d.generation, d.progress, alarm)
    else:
        d.incident.next_round()
    d.incident.add_alarm(alarm)
    d.pause = None
    d.nodes.ended, lost = set(), {*d.incident.silent, *d.out}
    d.phase, d.awaited = Phase.STOPPING, next(d.ids)
    grace_s, nodes = d.limits.stop_grace_s, tuple(s.node for s in d.seats if s.node not in lost)
    d.actions.append(Stop(id=d.awaited, generation=d.generation, nodes=nodes, grace_s=grace_s))
    return f"incident {d.incident.number}{_describe_rounds(d.incident)}: {incident_text.describe_cause(alarm)}"


def _describe_rounds(incident: Incident) -> str:
    """Return what this incident has already cost; "" in its first round."""
    if not incident.rounds:
        return ""
    gone = f", {', '.join(incident.evicted)} evicted so far" if incident.evicted else ""
    return f", failure {incident.failures} without a step in between{gone}"


def tolerates_slowness(d: "Decider", now: float, alarm: Alarm) -> str:
    """Return why a slow job is left running; "" if it must stop for an eviction or a rollback.

    A job without copies of its state would lose more than it gains, and a restart makes no slow machine faster.
    """
    if d.incident is not None or d.phase is not Phase.TRAINING:
        return "the job is not steady yet"
    if not d.failures.backed:
        return "its state is nowhere else, so to go on without it would cost more"
    incident = open_incident(now, d.incidents + 1, d.generation, d.progress, alarm)
    incident.add_alarm(alarm)
    case = d.failures.make_case(now, incident, d.releases, nodes=d.nodes, lost=set())
    if find_verdict(case).remedy in (Remedy.EVICT, Remedy.ROLLBACK):
        return ""
    return "it was as slow on another node" if case.follows_the_rank else "nobody may take its place"


def on_more_alarms(d: "Decider", alarm: Alarm) -> str:
    assert d.incident is not None
    d.incident.add_alarm(alarm)
    d.nodes.forget_returned(alarm.suspects)
    return f"incident {d.incident.number}: noted while stopping: {incident_text.describe_cause(alarm)}"


def on_last_steps(d: "Decider", event: Progress) -> str:
    """Take in steps that were made before the alarm or the order but reported after it."""
    if event.generation != d.generation:
        return ""
    d.nodes.on_step()
    d.releases.on_progress(event)
    if d.pause is not None:
        d.progress = event
        d.pause.on_late_step(event)
    if d.pause is not None or (d.incident and d.incident.on_late_step(event)):
        d.failures.on_progress(event)
    return ""


def on_stopped(d: "Decider", now: float, event: Outcome) -> str:
    """Judge the incident, now that every rank is down and all last words are in."""
    incident = d.incident
    assert incident is not None
    incident.stopped_at = now
    silent, lost = set(incident.silent), {*incident.silent, *event.failed}
    if event.departed:
        incident.on_departed(event.departed, d.seats)
    else:
        incident.on_timeout(d.named if d.named and d.named.generation == d.generation else None)
    d.named = None
    cause = incident.name_cause()
    if cause.not_after is not None:
        incident.good_step = min(incident.good_step, cause.not_after)
        d.course.doubt_after(d.generation, cause.not_after, d.progress)
        d.failures.discount_steps(cause.not_after)
    case = d.failures.make_case(now, incident, d.releases, nodes=d.nodes, lost=lost)
    verdict = d.failures.judge_case(now, case)
    d.nodes.unstopped = set(event.failed)
    launching.fence_unstopped(d, now, lost)
    if verdict.remedy in (Remedy.PROBE, Remedy.REPLAY):
        return start_probing(d, case, verdict)
    return apply_verdict(d, now, verdict, silent)


def apply_verdict(d: "Decider", now: float, verdict: Verdict, silent: Collection[str], *, examine: bool = True) -> str:
    """Carry out the verdict: give up, ask a person, or evict, roll back or skip and then launch again."""
    incident = d.incident
    assert incident is not None
    told = f"{incident_text.describe_cause(incident.alarms[0])}; {verdict.reason}"
    if verdict.remedy is Remedy.GIVE_UP:
        if d.limits.ask_s and verdict.code == GAVE_UP:
            d.verdict, d.phase = verdict, Phase.HELD
            return launching.ask_person(d, now, told)
        launching.close_incident(d, verdict, now)
        return launching.finish_job(d, now, verdict.code, told)
    d.verdict = verdict
    d.failures.restarts += verdict.remedy is Remedy.RESTART and incident.alarms[0].kind is not Kind.SLOW
    d.not_before = now + verdict.wait_s if verdict.wait_s else 0.0
    if verdict.remedy is Remedy.ROLLBACK:
        incident.rolled_back = d.releases.roll_back(verdict.to, told)
    d.course.apply_verdict(verdict, incident.alarms[0].not_after)
    incident.skipped += verdict.skips
    launching.evict_nodes(d, now, verdict.nodes, silent, examine=examine)
    d.nodes.back = {}
    return f"incident {incident.number}: {verdict.reason}; {launching.launch_or_wait(d, now)}"


def start_probing(d: "Decider", case: IncidentCase, verdict: Verdict) -> str:
    d.case, d.phase, d.awaited = case, Phase.PROBING, next(d.ids)
    seats = tuple(seat for seat in d.seats if seat.node not in d.out)
    action = make_probe_or_replay(d.awaited, d.generation, seats, verdict, d.course.doubts.not_after)
    said = Say(text=f"{incident_text.describe_cause(case.cause)}: {verdict.reason}")
    d.actions += [action, said] if verdict.level else [action]
    return verdict.reason


def on_alarm_in_probe(d: "Decider", alarm: Alarm) -> str:
    assert d.incident is not None
    if alarm.kind is Kind.SILENCE or is_node_proof(alarm):
        d.incident.lost |= dict.fromkeys(alarm.suspects, alarm)
        d.nodes.forget_returned(alarm.suspects)
    return f"noted while nodes are tried: {incident_text.describe_cause(alarm)}"


def on_probed(d: "Decider", now: float, event: Outcome) -> str:
    """Evict the nodes that were found bad or were lost meanwhile; if there are none, take the ladder's next rung."""
    incident, case = d.incident, d.case
    assert incident is not None and case is not None
    incident.probed_s, d.case = now - incident.stopped_at, None
    silent = {node for node, alarm in incident.lost.items() if alarm.kind is Kind.SILENCE}
    why = {node: alarm.reason for node, alarm in incident.lost.items()} | event.failed
    bad = {node: why[node] for node in sorted(d.nodes.active.intersection(why))}
    verdict = verdict_after_probe(case, bad, event.detail, replaceable=bool(silent) or d.nodes.can_do_without(bad))
    incident.lost = {}
    return apply_verdict(d, now, verdict, silent, examine=False)  # it was
