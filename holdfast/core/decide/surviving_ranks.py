"""Which ranks stay in their processes when a generation ends: who is parked, and who goes on at the next launch."""

from collections.abc import Collection

import msgspec

from holdfast.core.decide.job_state import JobState
from holdfast.model.action import Stop
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.incident_record import Remedy

_FAILED_SURVIVALS = 2
_SURVIVED = (Kind.CRASH, Kind.SILENCE, Kind.HANG, Kind.HEALTH)  # what other ranks can outlive


def can_survive(state: JobState, alarm: Alarm) -> bool:
    """Whether the surviving ranks can be parked instead of ended: all ranks must have reported with their first step
    that they can survive or, if the job's state lives in them, in the generation before. Not after an alarm about what
    ranks compute, because their processes may be at fault, nor after ranks of this script have twice failed to go on.
    """
    if state.failed_survivals >= _FAILED_SURVIVALS or state.limits.survive_s <= 0:
        return False
    survives = state.progress.survives if state.progress is not None else state.carries
    return survives and alarm.kind in _SURVIVED


def can_grow(state: JobState) -> bool:
    """Whether ranks can be parked while the job grows, to go on among more."""
    survives = state.progress is not None and state.progress.survives
    return state.resizes and survives and state.limits.survive_s > 0


def make_parking(state: JobState, stop: Stop, alarm: Alarm | None = None) -> Stop:
    """Return this action as one that has ranks park themselves. A rank that `alarm` is about is not counted, and not
    waited for if it hangs."""
    failed: Collection[int] = alarm.ranks if alarm else ()
    ranks = {rank for seat in state.nodes.active_seats if seat.node in stop.nodes for rank in seat.ranks}
    standing = alarm.ranks if alarm and alarm.kind is Kind.HANG else ()
    parking = len(ranks.difference(failed))
    return msgspec.structs.replace(stop, park_s=state.limits.survive_s, parking=parking, standing=standing)


def keeps_ranks(state: JobState, *, changed: bool) -> bool:
    """Whether parked ranks keep their processes: on a restart or eviction without a `changed` release or world size,
    and if they were parked for nodes that have come."""
    incident, verdict = state.incident, state.verdict
    if state.pause:
        return state.pause.parked and not changed
    if changed or incident is None or verdict is None or not incident.parked:
        return False
    return verdict.remedy in (Remedy.RESTART, Remedy.EVICT)


def describe_short(state: JobState) -> str:
    """Return of how many nodes the job uses how many, if its ranks go on with the same batch on fewer; else ""."""
    seated, wanted = len(state.nodes.seats), state.job.max_nodes
    return f"{seated} of {wanted} nodes, same batch" if state.resizes and seated < wanted else ""
