"""Which ranks stay in their processes when a generation ends: who is parked, and who goes on at the next launch."""

from collections.abc import Collection

import msgspec

from holdfast.core.decide.job_state import JobState
from holdfast.model.action import HandOver, Stop
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Remedy

_FAILED_SURVIVALS = 2
_SURVIVED = (Kind.CRASH, Kind.SILENCE, Kind.HANG, Kind.HEALTH)  # what other ranks can outlive


def can_survive(state: JobState, alarm: Alarm) -> bool:
    """Return whether the surviving ranks can be parked instead of ended. All ranks of this generation must have
    reported with their first step that they can survive. Before the first step, the job's state must live in its ranks.
    No rank is parked after an alarm about what ranks compute, because their processes may be at fault, nor after parked
    ranks of this script have failed twice to go on."""
    if state.failed_survivals >= _FAILED_SURVIVALS or state.limits.survive_s <= 0:
        return False
    survives = state.progress.survives if state.progress is not None else state.carries
    return survives and alarm.kind in _SURVIVED


def can_grow(state: JobState) -> bool:
    """Return whether ranks can be parked while the job grows, and then continue in the larger job."""
    survives = state.progress is not None and state.progress.survives
    return state.resizes and survives and state.limits.survive_s > 0


def can_hand_over(state: JobState, leaving: Collection[str]) -> bool:
    """Return whether ranks can be parked before these nodes leave, and then continue without them. Standbys must take
    the seats, or the ranks must go on with any number of ranks."""
    survives = state.progress is not None and state.progress.survives
    if not survives or state.limits.survive_s <= 0 or state.failed_survivals >= _FAILED_SURVIVALS:
        return False
    return state.resizes or len(state.nodes.usable_pool) >= len(leaving)


def add_hand_over(state: JobState, stop: Stop, leaving: Collection[str]) -> Stop:
    """Return this stop with the order to hand over first what only ranks on these nodes hold, if the job's state lives
    in its ranks. Half of the time for which a node's end is known ahead is left for the restart."""
    if not state.carries:
        return stop
    ranks = tuple(rank for seat in state.nodes.active_seats if seat.node in leaving for rank in seat.ranks)
    return msgspec.structs.replace(stop, hand_over=HandOver(ranks, state.limits.leave_s / 2))


def make_parking(state: JobState, stop: Stop, alarm: Alarm | None = None) -> Stop:
    """Return this stop with a time in which ranks can park themselves. `alarm` names ranks that will not park, because
    they failed. A hung rank among these is not waited for."""
    failed: Collection[int] = alarm.ranks if alarm else ()
    stopped = frozenset(stop.nodes)
    ranks = {rank for seat in state.nodes.active_seats if seat.node in stopped for rank in seat.ranks}
    standing = alarm.ranks if alarm and alarm.kind is Kind.HANG else ()
    parking = len(ranks.difference(failed))
    return msgspec.structs.replace(stop, park_s=state.limits.survive_s, parking=parking, standing=standing)


def keeps_ranks(state: JobState, *, changed: bool) -> bool:
    """Return whether parked ranks keep their processes at the next launch. They do after a restart or an eviction, or
    if they were parked for the job to grow, unless the release or the world size is `changed`."""
    incident, verdict = state.incident, state.verdict
    if state.pause:
        return state.pause.parked and not changed
    if changed or incident is None or verdict is None or not incident.parked:
        return False
    return verdict.remedy in (Remedy.RESTART, Remedy.EVICT)


def describe_short(state: JobState) -> str:
    """Return text such as "3 of 4 nodes, same batch" if the job can keep its batch on fewer nodes and now has fewer; ""
    in all other cases."""
    seated, wanted = len(state.nodes.seats), state.job.max_nodes
    return f"{seated} of {wanted} nodes, same batch" if state.resizes and seated < wanted else ""
