"""Counts interruptions by the rung of the ladder that ended them; planned restarts count beside incidents."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from holdfast.model.detector_alarm import Kind
from holdfast.model.incident_record import HELD, Change, Record, Remedy


class Rung(StrEnum):
    EVICTION = "eviction on proof"  # silence, a reading, last words
    HANG = "eviction for a hang or slowness"  # by stacks, mostly
    EXAMINED = "eviction after probes"  # or after a replay
    RESTART = "restart in place"
    ROLLBACK = "rollback"
    SKIP = "batches left out"
    UPDATE = "update"  # other code, at a planned restart
    ORDER = "a person's order"  # to evict or to drain nodes, or to go on after a hold
    GROWTH = "more nodes"  # a job that had fewer than it may have got some
    PERSON = "none: left to a person"  # or the job was stopped


def rung_of(record: Record) -> Rung:
    """Return the rung (remedy of the ladder) that ended an incident. If several were tried, it is the last one."""
    match record.verdict.remedy:
        case Remedy.GIVE_UP:
            return Rung.PERSON
        case Remedy.ROLLBACK:
            return Rung.ROLLBACK
        case Remedy.EVICT if record.probed_s:
            return Rung.EXAMINED
        case Remedy.EVICT:
            return Rung.HANG if (record.last_kind or record.kind) in (Kind.HANG, Kind.SLOW) else Rung.EVICTION
        case Remedy.SKIP if record.verdict.skips:
            return Rung.SKIP
    return Rung.RESTART  # whom a person evicts meanwhile says nothing about the failure


def rung_of_change(change: Change) -> Rung:
    """Return the kind of a planned restart, which is counted beside incidents: an update, an order or growth."""
    if change.brought_in or change.why == f"release {change.release}":
        return Rung.UPDATE
    return Rung.ORDER if change.evicted or change.why.startswith(HELD) else Rung.GROWTH


def count_rungs(incidents: Iterable[Record], changes: Iterable[Change] = ()) -> dict[str, int]:
    """Return how many interruptions each rung (remedy of the ladder) ended, the highest count first."""
    counts = Counter(rung_of(record) for record in incidents)
    counts.update(map(rung_of_change, changes))
    return {rung.value: count for rung, count in counts.most_common()}


def describe_rungs(counts: Mapping[str, int]) -> str:
    """Return a line with the number and share of interruptions that each rung (remedy) ended; "" without any."""
    total = sum(counts.values())
    said = ", ".join(f"{rung} {count} ({100 * count / total:.0f} %)" for rung, count in counts.items())
    return f"ended by: {said}" if said else ""
