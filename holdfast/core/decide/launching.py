"""The path from ready nodes to a training generation: which nodes get ranks, when to launch, and how a job ends."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from holdfast.core.decide import waiting_for_people
from holdfast.core.decide.job_state import JobState
from holdfast.core.decide.ongoing_planned_restart import Pause, resumed_step
from holdfast.core.decide.surviving_ranks import describe_short, keeps_ranks
from holdfast.core.incident import incident_text, recovery_phases
from holdfast.core.incident.first_cause import is_node_loss, is_node_proof
from holdfast.core.incident.incident_case import machine_faults
from holdfast.core.incident.ladder import GAVE_UP
from holdfast.core.incident.node_swap_text import describe_lack
from holdfast.core.incident.open_incident import Incident
from holdfast.core.membership.standbys import BRIEF, CHECK
from holdfast.core.rank_ranges import format_nodes, format_ranks
from holdfast.model.action import Action, Finish, HandOver, Say, Stop
from holdfast.model.code_release import Fate
from holdfast.model.decider_events import Begin, Ended, Outcome, Progress, Ready
from holdfast.model.detector_alarm import NO_STEP, Alarm, Kind, Stance
from holdfast.model.incident_record import Remedy, Verdict
from holdfast.model.job_and_seats import Seat, world_size
from holdfast.model.job_phase import Phase

STILL_CUT_OFF = "still without a link after the wait"
_STANDING = (Phase.WAITING, Phase.HELD)  # no generation is on, nor is one being ended


def on_begin(state: JobState, now: float, event: Begin) -> str:
    state.begin_job(event)
    return wait_for_nodes(state, now)


def on_ready(state: JobState, now: float, event: Ready) -> str:
    free = state.fence.note_empty(event.node) and state.phase is Phase.WAITING  # nodes that report have no ranks
    if state.nodes.is_active(event.node):
        absent = state.phase is Phase.HELD and state.incident is not None and event.node in state.incident.silent
        if absent or state.phase in (Phase.STOPPING, Phase.PROBING, Phase.PAUSING):
            state.nodes.back[event.node] = event
        return f"{event.node} is back; {launch_or_wait(state, now)}" if free else f"{event.node} is back"
    if event.blocked:
        state.emit(*state.nodes.standbys.faults.refuse(event))
        told = f"{event.node} is refused: {event.blocked}"
        return f"{told}; {launch_or_wait(state, now)}" if state.phase is Phase.WAITING else told
    # The first generation does not wait for checks: nobody knows which of its nodes will be standbys. One that the job
    # waits for gets a short one.
    level = 0 if state.generation == 0 else BRIEF if state.phase is Phase.WAITING else CHECK
    state.nodes.standbys.on_arrival(now, event.node)
    state.emit(*state.nodes.standbys.on_ready(event, level))
    if event.node in state.nodes.pool:
        return launch_or_wait(state, now) if state.phase is Phase.WAITING else f"{event.node} is ready as a standby"
    left = event.node in state.nodes.standbys.gone
    told = "had left the job before: not taken back" if left else "is checked before it may be a standby"
    return f"{event.node} {told}; {launch_or_wait(state, now)}" if free else f"{event.node} {told}"


def on_side_probe(state: JobState, now: float, found: tuple[str, tuple[Action, ...]]) -> str:
    """Report the result of a probe beside the job, of one evicted or newly arrived node. Launch the job if it waits."""
    reason, actions = found
    state.emit(*actions)
    return f"{reason}; {launch_or_wait(state, now)}" if state.phase is Phase.WAITING else reason


def tell_alarm(state: JobState, alarm: Alarm, more: str = "") -> str:
    """Report an alarm that does not stop the job. Remember a standstill until a step or the next verdict ends it."""
    named = state.standing is not None and state.standing.suspects and state.standing.generation == state.generation
    stands = alarm.signature == NO_STEP and not named
    if alarm.kind is Kind.HANG and (alarm.suspects or stands) and alarm.generation == state.generation:
        state.standing = alarm
    if alarm.stance is not Stance.OBSERVE:
        state.emit(Say(text=incident_text.describe_cause(alarm) + more))
    return f"{alarm.kind} ({alarm.stance}): {incident_text.describe_cause(alarm)}{more}"


def concerns_generation(state: JobState, alarm: Alarm) -> bool:
    if alarm.kind is Kind.SILENCE or (is_node_proof(alarm) and state.phase not in _STANDING):
        return any(state.nodes.is_active(node) and node not in state.nodes.ended for node in alarm.suspects)
    return alarm.generation == state.generation and state.phase not in _STANDING


def on_outside_alarm(state: JobState, now: float, alarm: Alarm) -> str:
    """Act on an alarm about a standby, a node still to come, a node that has finished, or an old generation."""
    if not is_node_loss(alarm):
        return ""
    lost = state.nodes.standbys.beside_job(alarm.suspects)
    state.nodes.standbys.faults.on_evicted(lost, machine_faults(alarm, {}, lost), 0)
    if lost:
        said = part_with_beside(state, lost, alarm.kind, alarm.reason)
        return f"{said}; {launch_or_wait(state, now)}" if state.phase is Phase.WAITING else said
    finished = state.nodes.ended.intersection(alarm.suspects)
    return f"{evict_nodes(state, now, finished, finished)} after its ranks had ended well" if finished else ""


def part_with_beside(state: JobState, nodes: Iterable[str], kind: Kind, why: str) -> str:
    """Dismiss lost nodes that have no seat. Return a sentence that names those that were standbys or evicted nodes."""
    evicted = state.nodes.standbys.under_examination.intersection(nodes)
    lost = {"standby": tuple(node for node in nodes if node not in evicted), "evicted node": tuple(sorted(evicted))}
    for what, those in lost.items():
        for node in those:
            cause = state.nodes.standbys.fleet.dismissal_of(node)
            state.emit(*state.nodes.standbys.dismiss_node(node, kind, f"{what} {why}", cause))
    who = " and ".join(f"{what} {', '.join(those)}" for what, those in lost.items() if those)
    said = f"{who} lost: {why}"
    state.emit(Say(text=said, standbys=lost["standby"]))
    return said


def evict_nodes(
    state: JobState,
    now: float,
    nodes: Iterable[str],
    silent: Collection[str],
    *,
    examine: bool = True,
    drained: Collection[str] = (),
    ordered: Mapping[str, str] | None = None,
) -> str:
    leaving, actions = state.nodes.evict_nodes(nodes, silent, state.generation, examine=examine, drained=drained)
    state.emit(*actions)
    at_once = len(leaving) > 1 and set(leaving) <= set(silent)  # one cause took them: a switch, or power
    state.failures.count_evictions(now, 1 if at_once else len(leaving))
    state.requests.on_nodes_left(tuple(leaving))
    state.nodes.links.forget_nodes(leaving, kept=state.nodes.standbys.suspects.keys())
    if state.interruption:
        state.interruption.on_evicted(tuple(leaving), ordered or {})
    return f"evicted {', '.join(leaving)}"


def evict_lost(state: JobState, now: float, nodes: Collection[str], kind: Kind) -> str:
    """Evict nodes that are lost while no rank runs. A verdict to restart in place becomes a verdict to evict."""
    told = evict_nodes(state, now, nodes, nodes if kind is Kind.SILENCE else ())
    if state.incident and state.verdict and state.verdict.remedy is Remedy.RESTART:
        state.incident.last_kind = kind.value
        gone, reason = state.incident.evicted, f"{state.verdict.reason}; then {told}"
        state.verdict = msgspec.structs.replace(state.verdict, remedy=Remedy.EVICT, nodes=gone, reason=reason)
    return told


def make_stop(state: JobState, lost: Collection[str] = ()) -> Stop:
    """Return the action that ends all ranks of this generation on the active nodes, except the `lost` ones."""
    nodes = tuple(seat.node for seat in state.nodes.active_seats if seat.node not in lost)
    return Stop(id=next(state.ids), generation=state.generation, nodes=nodes, grace_s=state.limits.stop_grace_s)


def fence_unstopped(state: JobState, now: float, nodes: Iterable[str]) -> None:
    """Block launches for a while if no active node confirmed the stop: the old generation may still be training."""
    known = state.nodes.standbys.fleet
    unknown = state.nodes.active.intersection(nodes).difference(state.nodes.back)  # who is back has been emptied
    unknown -= {node for node in unknown if known.is_gone(node)}
    if unknown == state.nodes.active:
        state.emit(*state.fence.raise_fence(now, unknown))


def on_dismissed(state: JobState, now: float, event: Outcome) -> str:
    """Handle the fleet's report that it has ended a fenced node, or that it could not end the node."""
    error = "" if event.ok else event.detail or "the fleet did not say why"
    node = state.nodes.standbys.fleet.parting.get(event.action)
    if error and node and state.incident is not None:
        state.incident.on_fleet_word(node, error)
    reason, actions = state.fence.on_dismissed(now, event.action, error)
    state.emit(*actions)
    return f"{reason}; {launch_or_wait(state, now)}" if state.phase is Phase.WAITING else reason


def drop_late_nodes(state: JobState, now: float) -> str:
    """Give back nodes that are late. Say why, if their fleet knows it."""
    standbys = state.nodes.standbys
    stuck = standbys.fleet.find_stuck(standbys.coming)
    late = standbys.tick(now, standing=state.phase is Phase.WAITING)
    state.emit(*late)
    for why in sorted({stuck[action.node] for action in late if action.node in stuck}):
        those = [action for action in late if stuck.get(action.node) == why]
        given_back = f"{format_nodes(action.node for action in those)} given back, as {those[0].reason}"
        state.emit(Say(text=f"{given_back}: {why}"))
        standbys.fleet.last_word = why
    return f"{format_nodes(action.node for action in late)} never became ready" if late else ""


def on_wait_tick(state: JobState, now: float) -> str:
    late = drop_late_nodes(state, now)
    reason = launch_or_wait(state, now)
    if state.phase is not Phase.WAITING or state.wait_until is None or now < state.wait_until:
        return f"{late}; {reason}" if late else reason
    if state.nodes.waits_in_queue or state.nodes.waits_for_checks:
        state.wait_until = now + state.limits.wait_s
        return reason
    unit, fewest = state.nodes.replica_nodes, state.nodes.fewest_nodes
    whole = f", as replicas take {unit}" if fewest > state.job.min_nodes else ""
    short = f"{state.nodes.node_count} of {fewest} nodes{whole} after {state.limits.wait_s:g} s"
    told = f"not enough nodes: {short}{state.nodes.wait_clause}; start more nodes or lower --nnodes"
    if state.limits.ask_s and not state.requests.asking:
        state.wait_until = now + state.limits.ask_s
        return waiting_for_people.ask_person(state, now, told)
    return finish_job(state, now, GAVE_UP, told)


def launch_or_wait(state: JobState, now: float) -> str:
    """Launch if enough nodes are ready and nothing holds the job back; otherwise wait."""
    state.next_move = _launch_or_wait(state, now)
    return state.next_move


def block_hosts(state: JobState) -> None:
    """Block the hosts of nodes that have left because their machines are bad."""
    if state.job.blocks and state.nodes.standbys.faults.has_evicted:
        state.emit(*state.nodes.standbys.block_hosts(state.nodes.active))


def on_block_outcome(state: JobState, now: float, event: Outcome) -> str:
    state.nodes.standbys.faults.on_block_outcome(event)
    return launch_or_wait(state, now) if state.phase is Phase.WAITING else ""


def _launch_or_wait(state: JobState, now: float) -> str:
    block_hosts(state)  # before the launch, as journals have it
    if state.requests.held:
        waiting_for_people.stand_still(state, now)
        return f"held by {state.requests.held}"
    state.not_before = 0.0 if now >= state.not_before else state.not_before
    if state.fence.blocks_launch(now):
        state.enter(Phase.WAITING)
        return state.fence.describe_wait(now)
    if state.not_before:
        state.enter(Phase.WAITING)
        return f"waiting for {state.not_before - now:.0f} s"
    if state.nodes.links.blocks_launch(now, state.nodes.active):
        state.wait_until = state.last_call_at = None  # nodes are waited for anew, once links are back
        state.requests.clear_question()
        state.enter(Phase.WAITING)
        return state.nodes.links.describe_wait(now, state.nodes.active)
    _part_with_late(state, now)
    if state.requests.evicting or state.requests.draining:
        spare = len(state.nodes.usable_pool) - len(state.nodes.out)  # seats that are empty come first
        leaving = state.requests.nodes_to_leave(state.nodes.active, spare)
        # Nothing is known to be wrong with them, so nobody looks. A person who evicts one has a reason.
        drained, told = state.requests.drained_nodes(leaving), state.requests.tell_orders(leaving)
        evict_nodes(state, now, leaving, (), examine=False, drained=drained, ordered=told)
    state.emit(*state.nodes.take_unchecked(now, state.waits_since if state.wait_until else now))
    # The first generation leaves torchrun's last call open for more nodes; a recovery does not wait for them.
    called = any(at is not None and at <= now for at in (state.last_call_at, state.wait_until))
    if seats := state.nodes.propose_seats(may_shrink=state.generation > 0 or called):
        return launch_generation(state, now, seats)
    if state.last_call_at is not None and state.last_call_at <= now:
        state.last_call_at = 0.0  # it is over, and nodes are too few for a replica: only another one changes that
    return wait_for_nodes(state, now)


def _part_with_late(state: JobState, now: float) -> None:
    """Evict or dismiss nodes whose links stayed down. A seated node stays if no standby can replace it."""
    late = sorted(state.nodes.links.take_late(now))
    seated, beside = sorted(state.nodes.active.intersection(late)), state.nodes.standbys.beside_job(late)
    if beside:
        part_with_beside(state, beside, Kind.HEALTH, STILL_CUT_OFF)
    if seated and state.nodes.can_do_without(seated):
        evict_lost(state, now, seated, Kind.HEALTH)
        state.emit(Say(text=f"{', '.join(seated)} {STILL_CUT_OFF}: evicted"))
    elif seated:
        lack = describe_lack(state.nodes.standbys.awaiting_checks, "them" if len(seated) > 1 else "it")
        state.emit(Say(text=f"{', '.join(seated)} still without a link, and {lack}: restarted in place"))


def launch_generation(state: JobState, now: float, seats: tuple[Seat, ...]) -> str:
    before, world, sitting = state.nodes.seated, world_size(state.nodes.seats), len(state.nodes.seats)
    admitted = state.nodes.take_seats(seats)
    if state.interruption:
        state.interruption.admitted += admitted
        state.interruption.ordered_at = now
    guess = state.verdict is not None and state.verdict.guess
    moved = state.generation > 0 and before != state.nodes.seated
    old = state.releases.running.number
    release = state.releases.next_release(now, machines=moved, guess=guess)
    if state.interruption and state.releases.fates[old] is Fate.REPLACED:
        state.interruption.brought_in = release.number
    state.requests.clear_question()
    state.progress, state.generation = None, state.generation + 1
    state.taken_over_at, state.untold = 0.0, False
    state.wait_until, state.last_call_at = None, None
    state.nodes.standbys.fleet.told_queue = ""
    state.grow_at = now + state.limits.last_call_s
    launch = state.resume_point.make_launch(next(state.ids), state.generation, seats, state.nodes.astray, release)
    state.resizes, state.carries = (told and release.number == old for told in (state.resizes, state.carries))
    changed = release.number != old or (world_size(seats) != world and not state.resizes)
    keep, carries = keeps_ranks(state, changed=changed), state.carries
    state.whole_in = state.whole_in if release.number == old else 0
    resizes = state.resizes or state.whole_in not in (0, world_size(seats))
    launch = msgspec.structs.replace(launch, keep=keep, resizes=resizes, carries=carries)
    state.emit(launch)
    if (short := describe_short(state)) and len(seats) != sitting:
        state.emit(Say(text=f"going on with {short}"))
    state.enter(Phase.LAUNCHING, launch.id)
    return f"launching generation {state.generation} on {format_nodes(seat.node for seat in seats)}"


def wait_for_nodes(state: JobState, now: float) -> str:
    if state.wait_until is None:
        state.wait_until, state.waits_since = now + state.limits.wait_s, now
    if state.nodes.node_count < state.nodes.fewest_nodes:
        state.last_call_at = None
    elif state.last_call_at is None:
        state.last_call_at = now + state.limits.last_call_s
    state.enter(Phase.WAITING)
    return f"waiting for nodes: {state.nodes.node_count} of {state.job.max_nodes}{state.nodes.wait_clause}"


def on_started(state: JobState, now: float, event: Outcome) -> str:
    state.enter(Phase.STARTING)
    if state.interruption:
        state.interruption.launched_at, state.interruption.apart = now, event.apart
        state.interruption.kept, state.interruption.short = event.kept, describe_short(state)
        state.interruption.renewed = world_size(state.nodes.seats) - event.kept if event.kept else 0
    if state.incident:
        state.incident.disks = event.disks
    return f"generation {state.generation} started" + (f", {event.detail}" if event.detail else "")


def on_progress(state: JobState, now: float, event: Progress) -> str:
    if event.generation != state.generation:
        return ""
    if state.standing is not None and event.at > state.standing.at:
        on_stall_over(state, state.standing, event)
    state.progress, state.untold, state.resizes, state.carries = event, False, event.resizes, event.carries
    state.whole_in = world_size(state.nodes.seats) if event.replicated else 0
    state.taken_over_at = 0.0 if event.at > state.taken_over_at else state.taken_over_at
    state.failures.on_progress(event)
    state.releases.on_progress(event)
    state.resume_point.doubts.on_progress(event)
    state.nodes.on_step()
    if state.phase is Phase.TRAINING:
        return ""
    state.resume_point.on_training()
    told = _end_interruption(state, event)
    state.enter(Phase.TRAINING)
    return told


def _end_interruption(state: JobState, event: Progress) -> str:
    """End the incident or the planned restart, if there is one, because the first step after the launch was made."""
    match state.interruption:
        case Incident() as incident:
            incident.on_recovered(event)
            return close_incident(state, state.current_verdict, event.first_at, resumed_step(event, incident))
        case Pause() as pause:
            state.changed, state.interruption = pause.make_change(event, state.releases.running.number), None
            state.emit(Say(text=state.changed.sentence), *state.resume_point.on_resumed(state.changed))
            return state.changed.sentence
    return f"training, first step after {event.first_step - 1} done" if not event.counted else "training"


def on_stall_over(state: JobState, named: Alarm, event: Progress) -> None:
    """Report that a stalled job has gone on by itself. The stall does not count as training time."""
    state.standing = None
    if state.phase is not Phase.TRAINING:
        return
    state.stood_since = named.at
    if named.stance is Stance.OBSERVE:
        return
    who = format_ranks(named.ranks) if named.ranks else "the job"
    stood = state.progress or event
    place = incident_text.describe_place(stood.step, counted=stood.counted)
    state.emit(Say(text=f"{who} went on after {event.at - state.stood_since:.0f} s {place}"))


def on_node_ended(state: JobState, now: float, event: Ended) -> str:
    if event.generation != state.generation:
        return ""
    state.nodes.ended.add(event.node)
    if event.reason:
        state.emit(Say(text=event.reason))
    if not state.nodes.active <= state.nodes.ended:
        return f"all ranks of {event.node} ended well"
    if state.verdict is not None:  # its ranks had nothing left to do: that, too, is recovery
        state.current_incident.on_nothing_left()
        # A job that never makes steps had recovered when its ranks ran.
        close_incident(state, state.verdict, now if state.failures.ever else 0.0)
    return finish_job(state, now, 0, "all ranks had come to their end" if event.left else "all ranks ended well")


def close_incident(state: JobState, verdict: Verdict, resumed_at: float, resumed_from: int | None = None) -> str:
    incident = state.current_incident
    if verdict.remedy is Remedy.GIVE_UP:
        recovery_phases.end_given_up(incident, resumed_at, state.phase, held=bool(state.requests.held))
    record = incident.make_record(verdict, resumed_at, resumed_from)
    # What was lost begins at the last good step, but a time without a controller says nothing about the failure.
    state.failures.on_recovered(record.resumed_at - max(record.good_at, incident.watched_at))
    if verdict.remedy is not Remedy.GIVE_UP:
        state.emit(Say(text=record.sentence), *state.resume_point.on_resumed(record))
    state.closed, state.interruption, state.verdict = record, None, None
    state.failed_survivals = 0 if record.kept else state.failed_survivals
    return record.sentence


def finish_job(
    state: JobState, now: float, code: int, reason: str, grace_s: float | None = None, *, last_s: float | None = None
) -> str:
    """End the job. Storage gets `last_s` seconds for the last state; None: the grace period of a shutdown."""
    doubts = state.resume_point.doubts
    heard = [alarm.not_after for alarm in state.incident.alarms] if state.incident else []  # perhaps not judged yet
    limits = [step for step in (*heard, doubts.not_after) if step is not None]
    if state.incident is not None:  # it ends with the job, and its record says so
        close_incident(state, Verdict(remedy=Remedy.GIVE_UP, code=code, reason=reason), now)
    state.interruption = None
    stop_s = state.limits.shutdown_grace_s if last_s is None else last_s
    last_s = 0.0 if grace_s == 0 else stop_s  # who is in a hurry does not wait for storage
    saves = last_s > 0 and state.phase is Phase.TRAINING and state.carries and not limits
    finish = Finish(
        id=next(state.ids),
        code=code,
        grace_s=state.limits.stop_grace_s if grace_s is None else grace_s,
        reason=reason,
        last_s=last_s,
        not_after=min(limits, default=None),
        verified=doubts.verified,
        hand_over=HandOver((), last_s / 2) if saves else None,
    )
    state.emit(finish)
    state.exit_code = code
    state.enter(Phase.ENDING, finish.id)
    state.next_move = reason
    return reason
