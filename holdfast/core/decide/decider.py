"""The policy of a job as one state machine: each step takes the time and an event and returns a decision.

This module only dispatches: one `match` over phase and event names the function for each. The functions read and
change the job's state; they import it, and one another, in one direction:

    job_state <- launching <- incident_course <- planned_restart, controller_takeover, operator_requests <- decider
    job_state <- launching <- fleet_news <- decider
"""

from holdfast.core.decide import (
    controller_takeover,
    fleet_news,
    incident_course,
    launching,
    operator_requests,
    planned_restart,
    shared_network_outage,
    told_mesh,
)
from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.job_view import JobView
from holdfast.core.incident.first_cause import launch_alarm
from holdfast.model.decider_events import (
    Begin,
    Ended,
    Event,
    LinksDown,
    LinksUp,
    MeshReport,
    Order,
    Outcome,
    Progress,
    Ready,
    SlowTime,
    Successor,
    Tick,
)
from holdfast.model.detector_alarm import SWITCH, Alarm, Kind, Stance
from holdfast.model.fleet_node_reports import FleetReport
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision
from holdfast.model.stored_checkpoint_report import StorageReport


class Decider:
    """The owner of a job's state. Only `step` changes it; everybody else looks at the `view`."""

    def __init__(self) -> None:
        self._state = JobState()
        self.view = JobView(self._state)

    def step(self, now: float, event: Event) -> Decision:
        state = self._state
        state.begin_step()
        reason = _dispatch(state, now, fleet_news.add_doubts(state, event) if isinstance(event, Alarm) else event)
        for follow in (fleet_news.drain_leaving, planned_restart.start_if_wanted):
            if state.phase in (Phase.STARTING, Phase.TRAINING):
                reason = "; ".join(part for part in (reason, follow(state, now)) if part)
        _look_after_standbys(state, now)
        launching.block_hosts(state)
        state.fence.watch_dismissals(state.actions)
        state.nodes.standbys.fleet.watch_evictions(event, state.actions)
        return state.make_decision(reason, _wake_at(state))


def _look_after_standbys(state: JobState, now: float) -> None:
    """Ask the fleet for missing nodes. Test nodes without a seat while the job trains or waits."""
    nodes, standbys = state.nodes, state.nodes.standbys
    if state.phase not in (Phase.ENDING, Phase.DONE):
        state.emit(*standbys.request_missing(fleet_news.count_staying(state), nodes.links.not_awaited(now)))
    if state.phase is Phase.WAITING:
        fleet_news.tell_queue(state)
    if state.phase in (Phase.TRAINING, Phase.WAITING):
        state.emit(*standbys.examine_evicted(nodes.links.nodes))
        if late := standbys.linkless_suspects(now, nodes.links.nodes):
            launching.part_with_beside(state, late, Kind.HEALTH, launching.STILL_CUT_OFF)
    if state.phase is Phase.TRAINING:
        state.emit(*standbys.recheck_due(now))


def _dispatch(state: JobState, now: float, event: Event) -> str:
    """Pass the event to the function for the current phase and event, and return the reason for its decision."""
    match state.phase, event:
        case Phase.NEW, Begin():
            return launching.on_begin(state, now, event)
        case (Phase.NEW, _) | (_, Begin()):
            pass  # a journal begins with a Begin and has no other
        case _, Successor():
            return controller_takeover.on_successor(state, now, event)
        case _, StorageReport() | SlowTime():
            return ""  # for the report: state in memory is what decisions are made of
        case _, MeshReport():
            return told_mesh.on_mesh_report(state, event)
        case Phase.ENDING, Outcome(action=id) if id == state.awaited:
            state.enter(Phase.DONE)
            return "done"
        case Phase.DONE, Order(verb="resume") if state.exit_code == fleet_news.OUT_OF_TIME:
            return fleet_news.go_on(state, now)
        case ((Phase.ENDING | Phase.DONE), _):
            return "the job is ending: no longer of interest"
        case _, Order(verb="stop"):
            grace_s = 0.0 if event.now else state.limits.shutdown_grace_s
            if event.code == fleet_news.OUT_OF_TIME:
                return fleet_news.finish_out_of_time(state, now, f"stopped by {event.who}", grace_s=grace_s)
            return launching.finish_job(state, now, event.code, f"stopped by {event.who}", grace_s)
        case _, Order():
            return operator_requests.on_order(state, now, event)
        case _, Ready():
            return launching.on_ready(state, now, event)
        case _, Outcome(action=id) if id in state.nodes.standbys.acquiring:
            return fleet_news.on_acquired(state, now, event)
        case _, FleetReport():
            return fleet_news.on_fleet_report(state, now, event)
        case _, Outcome(action=id) if state.fence.awaits_outcome(id):
            return launching.on_dismissed(state, now, event)
        case _, Outcome(action=id, ok=False) if id in state.nodes.standbys.fleet.parting:
            return fleet_news.on_parting_failed(state, event)
        case _, Outcome(action=id) if id in state.nodes.standbys.faults.blocking:
            return launching.on_block_outcome(state, now, event)
        case _, Outcome(action=id) if id in state.nodes.standbys.examined:
            return launching.on_side_probe(state, now, state.nodes.standbys.on_examined(now, event))
        case _, Outcome(action=id) if id in state.nodes.standbys.checking:
            return launching.on_side_probe(state, now, state.nodes.standbys.on_checked(now, event))
        case _, Outcome(action=id) if id in state.releases.staging:
            reason, actions = state.releases.on_staged(now, event, state.nodes.active)
            state.emit(*actions)
            return reason
        case _, Alarm() if event.stance is not Stance.ACT:
            state.full_disks.on_alarm(event)
            return launching.tell_alarm(state, event)
        case _, Alarm(signature=signature) if signature == SWITCH:
            return shared_network_outage.on_links_lost(state, now, event)
        case _, LinksDown():
            return shared_network_outage.on_links_down(state, event)
        case _, LinksUp():
            return shared_network_outage.on_links_up(state, now, event)
        case _, Alarm(kind=Kind.SLOW) if why := incident_course.tolerates_slowness(state, now, event):
            return launching.tell_alarm(state, event, f"; not acted on, as {why}")
        case _, Alarm() if why := incident_course.tolerates_lost_link(state, event):
            return launching.tell_alarm(state, event, f"; not acted on, as {why}")
        case _, Alarm() if not launching.concerns_generation(state, event):
            return launching.on_outside_alarm(state, now, event)
        case Phase.WAITING, Alarm():
            evicted = launching.evict_lost(state, now, event.suspects, event.kind)
            return f"{evicted}; {launching.launch_or_wait(state, now)}"
        case Phase.HELD, Alarm():
            return launching.evict_lost(state, now, event.suspects, event.kind)
        case Phase.WAITING, Tick():
            return launching.on_wait_tick(state, now)
        case Phase.HELD, Tick():
            return operator_requests.on_held_tick(state, now)
        case Phase.LAUNCHING, Outcome(action=id, ok=True) if id == state.awaited:
            return launching.on_started(state, now, event)
        case Phase.LAUNCHING, Outcome(action=id) if id == state.awaited:
            return incident_course.open_trouble(
                state, now, launch_alarm(now, event, state.generation, state.nodes.seats)
            )
        case ((Phase.LAUNCHING | Phase.STARTING | Phase.TRAINING), Alarm()):
            return incident_course.open_trouble(state, now, event)
        case ((Phase.LAUNCHING | Phase.STARTING | Phase.TRAINING), Progress()):
            return launching.on_progress(state, now, event)
        case ((Phase.LAUNCHING | Phase.STARTING | Phase.TRAINING), Ended()):
            return launching.on_node_ended(state, now, event)
        case Phase.PAUSING, Alarm():
            return planned_restart.on_alarm_in_pause(state, now, event)
        case ((Phase.STOPPING | Phase.PAUSING | Phase.PROBING), Progress()):
            return incident_course.on_last_steps(state, event)
        case Phase.PAUSING, Outcome(action=id) if id == state.awaited:
            return planned_restart.on_paused(state, now, event)
        case Phase.STOPPING, Alarm():
            return incident_course.on_more_alarms(state, now, event)
        case Phase.STOPPING, Outcome(action=id) if id == state.awaited:
            return incident_course.on_stopped(state, now, event)
        case Phase.PROBING, Alarm():
            return incident_course.on_alarm_in_probe(state, event)
        case Phase.PROBING, Outcome(action=id) if id == state.awaited:
            return incident_course.on_probed(state, now, event)
        case Phase.PROBING, Tick():
            return incident_course.on_probe_tick(state, now)
        case _, Tick():
            return launching.drop_late_nodes(state, now)
        case _, Outcome() | Progress() | Ended():
            return ""  # of an action or a generation that is over
    raise AssertionError((state.phase, event))


def _wake_at(state: JobState) -> float | None:
    if state.phase in (Phase.ENDING, Phase.DONE):
        return None
    steady, standing = state.phase is Phase.TRAINING, state.phase is Phase.WAITING
    waits = [state.nodes.standbys.wake_at(steady=steady, standing=standing)]
    if state.requests.asking and not state.requests.held:
        waits.append(state.requests.asks_until)
    if state.phase in (Phase.STARTING, Phase.TRAINING):
        waits += [state.releases.wake_at(), state.nodes.standbys.fleet.wake_at]
    if state.phase is Phase.TRAINING and state.nodes.may_grow():
        waits.append(state.grow_at)
    if state.phase is Phase.PROBING and not state.current_incident.probe_told:
        waits.append(state.current_incident.stopped_at + incident_course.LONG_PROBE_S)
    if state.phase is Phase.WAITING:
        waits += [state.wait_until, state.last_call_at or None, state.not_before or None, state.fence.until or None]
        if not (state.fence.until or state.not_before):  # else nobody asks for links before these are over
            waits.append(state.nodes.links.until or None)
            due = state.nodes.choose_unchecked(state.waits_since) if state.wait_until else None
            waits.append(due.at if due else None)
    return min((at for at in waits if at is not None), default=None)
