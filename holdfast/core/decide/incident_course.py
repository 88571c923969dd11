"""The course of an incident from first alarm to remedy: stop, judge, probe nodes if needed, and go on."""

from collections.abc import Collection

from holdfast.core.decide import launching, waiting_for_people
from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.ongoing_planned_restart import Pause
from holdfast.core.decide.surviving_ranks import can_survive, make_parking
from holdfast.core.incident import incident_text
from holdfast.core.incident.first_cause import is_node_loss
from holdfast.core.incident.incident_case import IncidentCase, machine_faults
from holdfast.core.incident.ladder import GAVE_UP, find_verdict, verdict_after_probe
from holdfast.core.incident.node_swap_text import describe_lack
from holdfast.core.incident.open_incident import Incident, open_incident
from holdfast.core.membership.seating import make_probe_or_replay
from holdfast.model.action import Say
from holdfast.model.decider_events import Outcome, Progress
from holdfast.model.detector_alarm import LEFT, Alarm, Kind
from holdfast.model.incident_record import Remedy, Verdict
from holdfast.model.job_phase import Phase
from holdfast.model.state_doubt import Doubt

ENDED_FOR_ROOM = "ended for want of room"  # of nodes that are gone because a disk was full
LONG_PROBE_S = 30.0  # a test of nodes that takes longer is told on the console


def open_trouble(state: JobState, now: float, alarm: Alarm, *, may_park: bool = True) -> str:
    """Open an incident, or start the next round of the open one. Stop every rank at once. With `may_park`, ranks that
    can survive stay in their processes."""
    state.failed_survivals += state.incident is not None and state.incident.parked
    incident = add_failure(state, now, alarm)
    incident.parked = may_park and can_survive(state, alarm)
    stop = launching.make_stop(state, incident.silent)
    if incident.parked:
        stop = make_parking(state, stop, alarm)
    state.emit(stop)
    state.enter(Phase.STOPPING, stop.id)
    return describe_round(incident)


def add_failure(state: JobState, now: float, alarm: Alarm) -> Incident:
    """Add the alarm to the open incident in a new round, or to a new incident, and return the incident."""
    incident = state.incident
    if incident is None:
        state.incidents += 1
        incident = open_incident(now, state.incidents, state.generation, state.progress, alarm)
        _date_failure(state, now, incident, alarm)
        if state.pause:
            _end_pause(state, state.pause, incident)
        state.interruption = incident
    else:
        incident.next_round(now)
    incident.add_alarm(alarm)
    if is_node_loss(alarm):  # it may have been back amid a pause, and is lost now
        state.nodes.forget_returned(alarm.suspects)
    state.nodes.ended = set()
    return incident


def _date_failure(state: JobState, now: float, incident: Incident, alarm: Alarm) -> None:
    """Move the incident's `good_at`, the time from which lost time counts. Time that the failure did not cost must come
    before it.

    If the script has made its last step, lost time counts from the failure. Unless this controller has taken the job
    over, nothing else changes. After a takeover, lost time counts from the takeover. But if a rank crashed before the
    takeover, it counts from the crash, or from that rank's last step if this step is known.
    """
    if state.progress and state.progress.parted:
        incident.good_at = max(incident.good_at, min(alarm.at, now))
    if not state.taken_over_at:
        return
    incident.watched_at = min(state.taken_over_at, now)
    incident.untold = state.untold and (alarm.signature != LEFT or state.progress is not None)
    if state.progress is None or alarm.kind is not Kind.CRASH or alarm.at >= incident.watched_at:
        incident.good_at = max(incident.good_at, incident.watched_at)
    elif incident.untold:
        incident.good_at = max(incident.good_at, alarm.at)  # the node tells when the rank ended, not its last step


def _end_pause(state: JobState, pause: Pause, incident: Incident) -> None:
    """Record that a planned restart failed, because an incident opened before its new ranks made a step. Do nothing if
    the new ranks are not launched yet: the restart after the incident then also does what was planned."""
    if state.phase is Phase.PAUSING:
        return
    state.changed = pause.make_failed_change(incident.good_at, state.releases.running.number)
    state.emit(Say(text=state.changed.sentence))
    incident.stood_step, incident.stood_counted = pause.good_step, pause.counted


def describe_round(incident: Incident) -> str:
    """Return a line about the first alarm of this round, with the failures and evictions of earlier rounds."""
    cost = ""
    if incident.rounds:
        gone = f", {', '.join(incident.evicted)} evicted so far" if incident.evicted else ""
        cost = f", failure {incident.failures} without a step in between{gone}"
    return f"incident {incident.number}{cost}: {incident_text.describe_round(incident.alarms[0])}"


def tolerates_slowness(state: JobState, now: float, alarm: Alarm) -> str:
    """Return why a slow job is left running; "" if it must stop for an eviction or a rollback.

    No other remedy stops a slow job, since a restart alone makes no slow machine faster. A job without copies of its
    state on peers is not stopped either, because a stop would cost more than it gains.
    """
    if state.incident is not None or state.phase is not Phase.TRAINING:
        return "the job is not steady yet"
    if not state.failures.backed:
        return "its state is nowhere else, so to go on without it would cost more"
    incident = open_incident(now, state.incidents + 1, state.generation, state.progress, alarm)
    incident.add_alarm(alarm)
    case = state.failures.make_case(now, incident, state.releases, nodes=state.nodes, lost=set())
    if find_verdict(case).remedy in (Remedy.EVICT, Remedy.ROLLBACK):
        return ""
    return "it was as slow on another node" if case.follows_the_rank else describe_lack(case.checking, may="may")


def tolerates_lost_link(state: JobState, alarm: Alarm) -> str:
    """Return why the job goes on despite a repeated alarm that a link is down; "" if it must stop.

    The alarm is repeated each hour, and once more if another agent takes over the reports about the host. The job goes
    on if it has already trained without the link since an earlier alarm, and has no standby to replace the node.
    """
    nodes = set(alarm.suspects)
    known = any(p.signature == alarm.signature and nodes == set(p.nodes) for p in state.failures.past)
    trains = state.phase is Phase.TRAINING and known and nodes <= state.nodes.links.nodes
    lone = trains and bool(nodes) and not state.nodes.can_do_without(nodes)
    why = describe_lack(state.nodes.standbys.awaiting_checks, "its node")
    return f"the job trains without it, and {why}" if lone else ""


def on_more_alarms(state: JobState, now: float, alarm: Alarm) -> str:
    incident = state.current_incident
    incident.on_more(now, alarm)
    if is_node_loss(alarm):  # a node that is back may tell late how its ranks ended, and is there all the same
        state.nodes.forget_returned(alarm.suspects)
    return f"incident {incident.number}: noted while stopping: {incident_text.describe_cause(alarm)}"


def on_last_steps(state: JobState, event: Progress) -> str:
    """Record steps that were made before the alarm or the order but reported after it."""
    if event.generation != state.generation:
        return ""
    state.nodes.on_step()
    state.releases.on_progress(event)
    state.resume_point.doubts.on_progress(event)
    match state.interruption:
        case Pause() as pause:
            state.progress = event
            pause.on_late_step(event)
            state.failures.on_progress(event)
        case Incident() as incident if incident.on_late_step(event):
            state.failures.on_progress(event)
    return ""


def on_stopped(state: JobState, now: float, event: Outcome) -> str:
    """Judge the incident. Every rank is down by now, and the last lines of all ranks have arrived."""
    incident = state.current_incident
    incident.stopped_at = now
    silent, lost = set(incident.silent), {*incident.silent, *event.failed}
    if event.departed:
        incident.on_departed(event.departed, state.nodes.seats)
    else:
        named = state.standing if state.standing and state.standing.suspects else None
        incident.on_timeout(named if named and named.generation == state.generation else None)
    state.standing = None
    incident.hosts = dict(state.nodes.hosts)
    incident.name_cause(state.full_disks, now)
    if incident.not_after is not None:
        telling = [alarm for alarm in incident.alarms if alarm.not_after is not None]
        proved = any(alarm.kind is Kind.REPLICA for alarm in telling)
        not_finite = all(alarm.kind is Kind.LOSS and alarm.response is None for alarm in telling)
        doubts, good_step = state.resume_point.doubts, incident.not_after
        if not_finite:
            good_step = doubts.find_last_good(state.generation, good_step, state.progress)
        incident.doubt_steps(good_step)
        doubt = Doubt(generation=state.generation, not_after=incident.not_after, proved=proved)
        doubts.doubt_after(doubt, state.progress, not_finite=not_finite, good_step=good_step)
        state.failures.discount_steps(good_step)
    elif incident.counted and incident.alarms[0].good_count is not None:
        incident.doubt_steps(incident.alarms[0].good_count)
    case = state.failures.make_case(now, incident, state.releases, nodes=state.nodes, lost=lost)
    verdict = state.failures.judge_case(now, case)
    state.nodes.unstopped = set(event.failed)
    launching.fence_unstopped(state, now, lost)
    if (case.is_switch or case.together) and verdict.remedy is not Remedy.GIVE_UP:  # the job may stand for long
        waits = case.is_switch and verdict.remedy is Remedy.RESTART
        bound = f"; waiting for them up to {incident_text.describe_wait(state.limits.wait_s)}" if waits else ""
        state.emit(Say(text=f"{verdict.reason}{bound}", until=now + state.limits.wait_s if waits else 0.0))
    if verdict.remedy in (Remedy.PROBE, Remedy.REPLAY):
        return start_probing(state, case, verdict)
    return apply_verdict(state, now, verdict, silent)


def apply_verdict(
    state: JobState, now: float, verdict: Verdict, silent: Collection[str], *, examine: bool = True
) -> str:
    """Carry out the verdict: give up, unless a person is asked first, or evict, roll back or skip and then launch."""
    incident = state.current_incident
    told = f"{incident.cause_text}; {verdict.reason}"
    if verdict.remedy is Remedy.GIVE_UP:
        if incident.alarms[0].kind is Kind.LOSS:
            state.resume_point.doubts.trust_redone()
        if state.limits.ask_s and verdict.code == GAVE_UP:
            state.verdict = verdict
            incident.absent = tuple(sorted(silent))
            more = waiting_for_people.advise_person(incident.alarms[0], verdict.reason)
            asked = waiting_for_people.ask_person(state, now, f"{told}{more}")
            waiting_for_people.stand_still(state, now)
            return asked
        launching.close_incident(state, verdict, now)
        return launching.finish_job(state, now, verdict.code, told)
    state.verdict = verdict
    state.failures.restarts += verdict.remedy is Remedy.RESTART and incident.alarms[0].kind is not Kind.SLOW
    state.not_before = now + verdict.wait_s if verdict.wait_s else 0.0
    if verdict.remedy is Remedy.ROLLBACK:
        incident.rolled_back = state.releases.roll_back(verdict.to, told)
    state.resume_point.apply_verdict(verdict, incident.alarms[0].not_after)
    incident.skipped += verdict.skips
    faults = machine_faults(incident.alarms[0], incident.found, verdict.nodes)
    state.nodes.standbys.faults.on_evicted(verdict.nodes, faults, incident.number)
    ended = dict.fromkeys(verdict.nodes, ENDED_FOR_ROOM) if verdict.remedy is Remedy.RESTART else {}
    launching.evict_nodes(state, now, verdict.nodes, silent, examine=examine, ordered=ended)
    state.nodes.back = {}
    return f"incident {incident.number}: {verdict.reason}; {launching.launch_or_wait(state, now)}"


def start_probing(state: JobState, case: IncidentCase, verdict: Verdict) -> str:
    state.case, doubts = case, state.resume_point.doubts
    state.current_incident.parked = False  # nodes are tried with nothing else on their devices
    seats = state.nodes.active_seats
    action = make_probe_or_replay(next(state.ids), state.generation, seats, verdict, doubts.not_after)
    state.emit(action)
    if verdict.level:
        state.emit(Say(text=f"{state.current_incident.cause_text}: {verdict.reason}"))
    state.enter(Phase.PROBING, action.id)
    return verdict.reason


def on_alarm_in_probe(state: JobState, alarm: Alarm) -> str:
    if is_node_loss(alarm):
        state.current_incident.lost |= dict.fromkeys(alarm.suspects, alarm)
        state.nodes.forget_returned(alarm.suspects)
    return f"noted while nodes are probed: {incident_text.describe_cause(alarm)}"


def on_probe_tick(state: JobState, now: float) -> str:
    incident, late = state.current_incident, launching.drop_late_nodes(state, now)
    if incident.probe_told or now < incident.stopped_at + LONG_PROBE_S:
        return late
    incident.probe_told = True
    told = f"nodes have been tested for {now - incident.stopped_at:.0f} s, as {incident.cause_text}"
    state.emit(Say(text=told))
    return "; ".join(filter(None, (late, told)))


def on_probed(state: JobState, now: float, event: Outcome) -> str:
    """Evict the nodes that the probe found bad and the nodes that were lost during the probe. If there are none, or no
    standby can replace them, take the next remedy of the ladder."""
    incident, case = state.current_incident, state.current_case
    incident.probed_s, state.case = now - incident.stopped_at, None
    incident.found = {node: why for node, why in event.failed.items() if node not in event.untested}
    silent = {node for node, alarm in incident.lost.items() if alarm.kind is Kind.SILENCE}
    why = {node: alarm.reason for node, alarm in incident.lost.items()} | event.failed
    bad = {node: why[node] for node in sorted(state.nodes.active.intersection(why))}
    verdict = verdict_after_probe(case, bad, event.detail, replaceable=bool(silent) or state.nodes.can_do_without(bad))
    incident.lost = {}
    return apply_verdict(state, now, verdict, silent, examine=False)  # it was
