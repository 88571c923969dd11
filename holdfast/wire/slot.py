"""The reading end of a rank's slot."""

import mmap

import msgspec

from holdfast.wire.record import COLD, COUNTED, FAILED, GRAD_NORM, HOT, LOSS, SLOT_BYTES, Slot, newest, open_arena

__all__ = ["SLOT_BYTES", "Reading", "Slot", "clear", "open_arena", "read"]

_TRIES = 8


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a slot said at one instant; instants are CLOCK_MONOTONIC seconds, the same for the whole host."""

    seq: int
    generation: int
    rank: int
    pid: int
    step: int  # -1: none yet
    counted: bool  # by the optimizer hook, not told by the script
    at: float  # of the last step; of the start while there is none
    first_step: int
    first_at: float
    loss: float | None
    grad_norm: float | None
    loss_step: int  # the step that loss and grad_norm belong to
    first_bad_step: int  # the first step whose loss or grad_norm was not finite; -1: none
    phase: str
    phase_at: float
    failed: bool
    failed_at: float
    failure: str


def read(buf: mmap.mmap | memoryview, index: int) -> Reading | None:
    """The newest whole record; None if the slot is empty or no record was whole in a few tries."""
    for _ in range(_TRIES):
        image = bytes(buf[index * SLOT_BYTES : (index + 1) * SLOT_BYTES])
        body = newest(image)
        if body is not None:
            return _reading(body)
        if not any(image):
            return None
    return None


def clear(buf: mmap.mmap | memoryview, index: int) -> None:
    """Empty the slot before a launch; a writer that is still alive fills it again with its own generation."""
    buf[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)


def _reading(body: bytes) -> Reading:
    seq, flags, step, at, loss_step, loss, grad_norm = HOT.unpack_from(body)
    generation, rank, pid, first_step, first_at, first_bad_step, *rest = COLD.unpack_from(body, HOT.size)
    phase_at, failed_at, phase, failure = rest
    return Reading(
        seq=seq,
        generation=generation,
        rank=rank,
        pid=pid,
        step=step,
        counted=bool(flags & COUNTED),
        at=at,
        first_step=first_step,
        first_at=first_at,
        loss=loss if flags & LOSS else None,
        grad_norm=grad_norm if flags & GRAD_NORM else None,
        loss_step=loss_step,
        first_bad_step=first_bad_step,
        phase=phase.rstrip(b"\0").decode("ascii", "replace"),
        phase_at=phase_at,
        failed=bool(flags & FAILED),
        failed_at=failed_at,
        failure=failure.rstrip(b"\0").decode("utf-8", "ignore"),
    )
