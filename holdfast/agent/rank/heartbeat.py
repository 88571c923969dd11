"""What the ranks of a node have told, in one beat: the slowest rank's step speaks for the node."""

from collections.abc import Iterable, Sequence

from holdfast.core.detect.pace import agreed_origin
from holdfast.model.signal import Beat
from holdfast.wire.rank_memory.slot_reader import SlotReading


def make_beat(node: str, readings: Sequence[SlotReading], wall_s: float) -> Beat:
    """Of ranks that all have made a step; `wall_s` makes their instants the controller's."""
    slowest = min(readings, key=lambda r: (r.step, -r.at))
    return Beat(
        node=node,
        generation=slowest.generation,
        step=slowest.step,
        at=slowest.at + wall_s,
        first_step=min(r.first_step for r in readings),
        first_at=max(r.first_at for r in readings) + wall_s,
        counted=slowest.counted,
        origin=agreed_origin(r.origin if r.counted else -1 for r in readings),
        loss=slowest.loss,
        phase=slowest.phase,
        # One rank that does not ask would make the step that all the others leave out, and wait for them in it.
        skippable=all(r.skippable for r in readings),
        grouped_at=_latest_instant([r.grouped_at for r in readings], wall_s),
        restored_at=_latest_instant([r.restored_at for r in readings], wall_s),
        skipped=max(r.skipped for r in readings),
        skipped_samples=sum(r.skipped_samples for r in readings),
    )


def _latest_instant(instants: list[float], wall_s: float) -> float:
    """The latest of those that were told; 0: none was."""
    return max(instants) + wall_s if any(instants) else 0.0


def returned_ranks(readings: Iterable[SlotReading], generation: int) -> set[int]:
    """Ranks whose script has come to its end, though their process may still be about to."""
    return {reading.rank for reading in readings if reading.generation == generation and reading.ending == "returned"}
