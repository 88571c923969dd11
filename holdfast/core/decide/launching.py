"""The path from ready nodes to a training generation: who gets ranks, when to launch, and how the job ends."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from holdfast.core.decide.launch_fence import Fence
from holdfast.core.decide.operator_requests import resumed_step
from holdfast.core.incident import incident_text
from holdfast.core.incident.first_cause import is_node_proof
from holdfast.core.incident.ladder import GAVE_UP
from holdfast.core.membership.standbys import BRIEF, CHECK
from holdfast.model.action import Action, Finish, Say
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.event import Begin, Ended, Outcome, Phase, Progress, Ready
from holdfast.model.incident_record import Remedy, Verdict
from holdfast.model.job_seats import Seat

if TYPE_CHECKING:
    from holdfast.core.decide.decider import Decider

_STANDING = (Phase.WAITING, Phase.HELD)  # no generation is on, nor is one being ended


def on_begin(d: "Decider", now: float, event: Begin) -> str:
    d.job, d.limits = event.job, event.limits
    d.reset_parts(event.release)
    d.fence = Fence(event.fence_s, fleet_ends=event.job.can_acquire)
    return wait_for_nodes(d, now)


def on_ready(d: "Decider", now: float, event: Ready) -> str:
    free = d.fence.note_empty(event.node) and d.phase is Phase.WAITING  # nodes that report have no ranks
    if d.nodes.is_active(event.node):
        if d.phase in (Phase.STOPPING, Phase.PROBING, Phase.PAUSING):
            d.nodes.back[event.node] = event
        return f"{event.node} is back; {launch_or_wait(d, now)}" if free else f"{event.node} is back"
    # The first generation does not wait for checks: nobody knows which of its nodes will be standbys. One that the job
    # waits for gets a short one.
    level = 0 if d.generation == 0 else BRIEF if d.phase is Phase.WAITING else CHECK
    d.nodes.standbys.on_arrival(now, event.node)
    d.actions += d.nodes.standbys.on_ready(event, level)
    if event.node in d.pool:
        return launch_or_wait(d, now) if d.phase is Phase.WAITING else f"{event.node} is ready as a standby"
    left = event.node in d.gone
    told = "had left the job before: not taken back" if left else "is checked before it may be a standby"
    return f"{event.node} {told}; {launch_or_wait(d, now)}" if free else f"{event.node} {told}"


def on_side_probe(d: "Decider", now: float, found: tuple[str, tuple[Action, ...]]) -> str:
    """Handle the result of a probe of an evicted or newly arrived node, made while the job went on."""
    reason, actions = found
    d.actions += actions
    return f"{reason}; {launch_or_wait(d, now)}" if d.phase is Phase.WAITING else reason


def tell_alarm(d: "Decider", alarm: Alarm, more: str = "") -> str:
    """Report an alarm that stops nobody, and remember which ranks keep the others waiting."""
    if alarm.kind is Kind.HANG and alarm.suspects and alarm.generation == d.generation:
        d.named = alarm
    if alarm.stance is not Stance.OBSERVE:
        d.actions.append(Say(text=incident_text.describe_cause(alarm) + more))
    return f"{alarm.kind} ({alarm.stance}): {incident_text.describe_cause(alarm)}{more}"


def concerns_generation(d: "Decider", alarm: Alarm) -> bool:
    if alarm.kind is Kind.SILENCE or (is_node_proof(alarm) and d.phase not in _STANDING):
        return any(d.nodes.is_active(node) and node not in d.nodes.ended for node in alarm.suspects)
    return alarm.generation == d.generation and d.phase not in _STANDING


def on_outside_alarm(d: "Decider", now: float, alarm: Alarm) -> str:
    """Handle an alarm about a standby, a node still coming, a finished node or an old generation."""
    if alarm.kind is not Kind.SILENCE and not is_node_proof(alarm):
        return ""
    lost = d.nodes.standbys.beside_job(alarm.suspects)
    for node in lost:
        d.actions += d.nodes.standbys.dismiss_node(node, alarm.kind, incident_text.describe_lost_standby(alarm))
    if lost:
        waiting = f"; {launch_or_wait(d, now)}" if d.phase is Phase.WAITING else ""
        return f"standby {', '.join(lost)} lost: {alarm.reason}{waiting}"
    finished = d.nodes.ended.intersection(alarm.suspects)
    return f"{evict_nodes(d, now, finished, finished)} after its ranks had ended well" if finished else ""


def evict_nodes(
    d: "Decider", now: float, nodes: Iterable[str], silent: Collection[str], *, examine: bool = True
) -> str:
    leaving, actions = d.nodes.evict_nodes(nodes, silent, d.generation, examine=examine)
    d.actions += actions
    d.failures.count_evictions(now, len(leaving))
    d.people.on_nodes_left(tuple(leaving))
    for trouble in (d.incident, d.pause):
        if trouble:
            trouble.evicted += tuple(leaving)
    return f"evicted {', '.join(leaving)}"


def fence_unstopped(d: "Decider", now: float, nodes: Iterable[str]) -> None:
    """Raise the fence if no active node confirmed the stop, because then the old generation may still be training."""
    unknown = d.nodes.active.intersection(nodes).difference(d.nodes.back)  # who is back has been emptied
    if unknown == d.nodes.active:
        d.actions += d.fence.raise_fence(now, unknown)


def on_dismissed(d: "Decider", now: float, event: Outcome) -> str:
    """Handle the fleet's report that it has ended a node that did not answer, or could not end it."""
    error = "" if event.ok else event.detail or "the fleet did not say why"
    reason, actions = d.fence.on_dismissed(now, event.action, error)
    d.actions += actions
    return f"{reason}; {launch_or_wait(d, now)}" if d.phase is Phase.WAITING else reason


def drop_late_nodes(d: "Decider", now: float) -> str:
    late = d.nodes.standbys.tick(now, standing=d.phase is Phase.WAITING)
    d.actions += late
    return f"{', '.join(action.node for action in late)} never became ready" if late else ""


def on_wait_tick(d: "Decider", now: float) -> str:
    late = drop_late_nodes(d, now)
    reason = launch_or_wait(d, now)
    if d.phase is not Phase.WAITING or d.wait_until is None or now < d.wait_until:
        return f"{late}; {reason}" if late else reason
    short = f"{d.nodes.node_count} of {d.job.min_nodes} nodes after {d.limits.wait_s:g} s"
    told = f"not enough nodes: {short}; start more nodes or lower --nnodes"
    if d.limits.ask_s and not d.people.asking:
        d.wait_until = now + d.limits.ask_s
        return ask_person(d, now, told)
    return finish_job(d, now, GAVE_UP, told)


def launch_or_wait(d: "Decider", now: float) -> str:
    """Launch if enough nodes are there and nothing holds the job back; otherwise wait for what is missing."""
    if d.people.held:
        d.phase = Phase.HELD
        return f"held by {d.people.held}"
    fenced, d.not_before = d.fence.blocks_launch(now), d.not_before if now < d.not_before else 0.0
    if fenced or d.not_before:
        d.phase = Phase.WAITING
        return d.fence.describe_wait(now) if fenced else f"waiting for {d.not_before - now:.0f} s"
    if d.people.evicting or d.people.draining:
        evict_nodes(
            d, now, d.people.nodes_to_leave(d.nodes.active, len(d.pool)), (), examine=False
        )  # a person wants them gone
    # The first generation leaves torchrun's last call open for more nodes; a recovery does not wait for them.
    called = any(at is not None and at <= now for at in (d.last_call_at, d.wait_until))
    seats = d.nodes.propose_seats(may_shrink=d.generation > 0 or called)
    return wait_for_nodes(d, now) if seats is None else launch_generation(d, now, seats)


def launch_generation(d: "Decider", now: float, seats: tuple[Seat, ...]) -> str:
    before, admitted = d.nodes.seated, d.nodes.take_seats(seats)
    for trouble in (d.incident, d.pause):
        if trouble:
            trouble.admitted += admitted
    guess = d.verdict is not None and d.verdict.guess
    release = d.releases.next_release(now, machines=d.generation > 0 and before != d.nodes.seated, guess=guess)
    d.people.clear_question()
    d.progress, d.generation = None, d.generation + 1
    d.phase, d.wait_until, d.last_call_at = Phase.LAUNCHING, None, None
    d.grow_at = now + d.limits.last_call_s
    d.awaited = next(d.ids)
    launch = d.course.make_launch(d.awaited, d.generation, seats, d.nodes.astray, release)
    d.actions.append(launch)
    return f"launching generation {d.generation} on {', '.join(s.node for s in seats)}"


def wait_for_nodes(d: "Decider", now: float) -> str:
    d.phase = Phase.WAITING
    if d.wait_until is None:
        d.wait_until = now + d.limits.wait_s
    if d.nodes.node_count < d.job.min_nodes:
        d.last_call_at = None
    elif d.last_call_at is None:
        d.last_call_at = now + d.limits.last_call_s
    return f"waiting for nodes: {d.nodes.node_count} of {d.job.max_nodes}"


def on_started(d: "Decider", now: float, event: Outcome) -> str:
    d.phase = Phase.STARTING
    for trouble in (d.incident, d.pause):
        if trouble:
            trouble.launched_at = now
    return f"generation {d.generation} started" + (f", {event.detail}" if event.detail else "")


def on_progress(d: "Decider", now: float, event: Progress) -> str:
    if event.generation != d.generation:
        return ""
    if d.named is not None and event.at > d.named.at:
        on_stall_over(d, d.named, event)
    d.progress = event
    d.failures.on_progress(event)
    d.releases.on_progress(event)
    d.nodes.on_step()
    if d.phase is Phase.TRAINING:
        return ""
    d.phase = Phase.TRAINING
    d.course.on_training()
    if d.incident is not None and d.verdict is not None:
        d.pause = None
        d.incident.on_recovered(event)
        return close_incident(d, d.verdict, event.first_at, resumed_step(event, d.incident))
    if d.pause is not None:
        d.changed, d.pause = d.pause.make_change(event, d.releases.running.number), None
        d.actions += (Say(text=d.changed.sentence), *d.course.on_resumed(d.changed))
        return d.changed.sentence
    return f"training, first step after {event.first_step - 1} done" if not event.counted else "training"


def on_stall_over(d: "Decider", named: Alarm, event: Progress) -> None:
    """Report that a stalled job has gone on by itself. The stall does not count as training time."""
    d.named = None
    if d.phase is not Phase.TRAINING:
        return
    d.stood_since = named.at
    who = f"rank {', '.join(map(str, named.ranks))}" if named.ranks else "the job"
    d.actions.append(Say(text=f"{who} went on after {event.at - d.stood_since:.0f} s, at step {event.step}"))


def on_node_ended(d: "Decider", now: float, event: Ended) -> str:
    if event.generation != d.generation:
        return ""
    d.nodes.ended.add(event.node)
    if event.reason:
        d.actions.append(Say(text=event.reason))
    if not d.nodes.active <= d.nodes.ended:
        return f"all ranks of {event.node} ended well"
    if d.verdict is not None:  # its ranks had nothing left to do: that, too, is recovery
        close_incident(
            d, d.verdict, now if d.failures.ever else 0.0
        )  # who never makes steps had recovered when ranks ran
    return finish_job(d, now, 0, "all ranks had come to their end" if event.left else "all ranks ended well")


def close_incident(d: "Decider", verdict: Verdict, resumed_at: float, resumed_from: int | None = None) -> str:
    assert d.incident is not None
    d.closed = d.incident.make_record(verdict, resumed_at, resumed_from)
    d.failures.on_recovered(d.closed.resumed_at - d.closed.good_at)  # what was lost begins at the last good step
    if verdict.remedy is not Remedy.GIVE_UP:
        d.actions += (Say(text=d.closed.sentence), *d.course.on_resumed(d.closed))
    d.incident, d.verdict = None, None
    return d.closed.sentence


def ask_person(d: "Decider", now: float, question: str) -> str:
    d.people.ask_question(question, now + d.limits.ask_s)
    d.actions.append(Say(text=f"a person is asked, for {d.limits.ask_s / 60:.0f} minutes: {question}"))
    return f"asks a person: {question}"


def finish_job(d: "Decider", now: float, code: int, reason: str, grace_s: float | None = None) -> str:
    doubts = d.course.doubts
    heard = [alarm.not_after for alarm in d.incident.alarms] if d.incident else []  # perhaps not judged yet
    limits = [step for step in (*heard, doubts.not_after) if step is not None]
    if d.incident is not None:  # it ends with the job, and its record says so
        close_incident(d, Verdict(remedy=Remedy.GIVE_UP, code=code, reason=reason), now)
    last_s = 0.0 if grace_s == 0 else d.limits.shutdown_grace_s  # who is in a hurry does not wait for storage
    finish = Finish(
        id=next(d.ids),
        code=code,
        grace_s=d.limits.stop_grace_s if grace_s is None else grace_s,
        reason=reason,
        last_s=last_s,
        not_after=min(limits, default=None),
        verified=doubts.verified,
    )
    d.phase, d.awaited = Phase.ENDING, finish.id
    d.actions.append(finish)
    return reason
