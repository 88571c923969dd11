"""Reads a rank's progress slot from shared memory."""

import mmap
from zlib import crc32

import msgspec

from holdfast.core.terminal_sanitizer import CUT, mark_cut
from holdfast.model.message_bounds import MOST, MOST_REAL, MOST_S
from holdfast.model.observation import Mark, StepValues
from holdfast.wire.rank_memory.slot_writer import (
    CARRIES,
    CLAIMED,
    COLD,
    COUNTED,
    ENTRY_BYTES,
    FAILED,
    GRAD_NORM,
    HOT,
    LOSS,
    MADE_UP,
    MARK,
    MARKED,
    NUMBERED,
    OWN_NORM,
    PARTED,
    PARTING,
    REPLICATED,
    RESIZES,
    RETURNED,
    RING,
    RING_AT,
    SKIPPABLE,
    SLOT_BYTES,
    SUM,
    SURVIVES,
    UPDATE,
    VALUES,
    SlotWriter,
    newest_record,
    open_slot_memory,
)

__all__ = ["SLOT_BYTES", "SlotReading", "SlotWriter", "clear_slot", "open_slot_memory", "read_entries", "read_slot"]

PARAMETERS = "parameters"  # the part of the state of which ranks tell marks themselves

_TRIES = 8

_ENDINGS = {RETURNED: "returned", PARTING: "parting", PARTED: "parted"}  # the first that is set counts


class SlotReading(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a slot at one instant; times are CLOCK_MONOTONIC seconds, the same for the whole host."""

    seq: int
    generation: int
    rank: int
    pid: int
    step: int  # -1: none yet
    counted: bool  # by the optimizer hook, not told by the script
    at: float  # of the last step; of the start while there is none
    first_step: int  # of this generation, left out or not
    first_at: float
    loss: float | None
    grad_norm: float | None
    loss_step: int  # the step that loss and grad_norm belong to
    first_bad_step: int  # the first step whose loss was not finite; -1: none
    phase: str
    phase_at: float
    failed: bool
    failed_at: float
    failure: str
    grouped_at: float  # when it had its process group; 0: it has not told
    restored_at: float  # and its state
    skippable: bool  # the script asks which batches to leave out
    skipped: int  # batches that it has left out
    skipped_samples: int  # in these, as far as they could be counted
    origin: int  # steps that were made before the first counted one; -1: nobody knows
    made_up: bool = False  # its optimizer has counted one more, which torch made only to create its state
    numbered: bool = False  # a first step that was counted has the number that the job's steps have
    tokens: float = 0.0  # that the steps of this generation took, as the script tells it; 0: it does not
    flops: float = 0.0  # and floating-point operations
    parameters: int = 0  # that its optimizers train; 0: not known
    restoring_at: float = 0.0  # when it began to restore its state
    restored: int = -1  # the step of that state, by its Checkpointer; -1: it has not told
    set_up_at: float = 0.0  # until when it was seen to set itself up, before its training loop; 0: not known
    skipped_updates: int = 0  # in a row, by torch's GradScaler
    lasting_bad_step: int = -1  # the first step whose loss was not finite and whose next one was not either
    claimed: bool = False  # the process of this pid makes the rank's steps
    survives: bool = False  # it can go on in its process when another rank fails
    resizes: bool = False  # and among more or fewer ranks, with the same batch
    carries: bool = False  # its state lives in its process, and it brings it to others
    replicated: bool = False  # it has the whole state, as every other rank has
    ending: str = ""  # of a script: "returned", "parting" (it destroys its process groups), "parted" (none is left)


def read_slot(buf: mmap.mmap | memoryview, index: int) -> SlotReading | None:
    """Return the newest whole record. Return None if the slot is empty, if a few tries find no whole record, or if a
    value is impossible. An impossible value would make the controller refuse the node's whole message."""
    for _ in range(_TRIES):
        image = bytes(buf[index * SLOT_BYTES : index * SLOT_BYTES + RING_AT])
        body = newest_record(image)
        if body is not None:
            reading = _parse_reading(body)
            return reading if _is_possible(reading) else None
        if not any(image):
            return None
    return None


def read_entries(
    buf: mmap.mmap | memoryview, index: int, reading: SlotReading, after: int
) -> tuple[int, list[StepValues | Mark]]:
    """Return the step values and hashes in the slot's ring with numbers above `after`, in order. Also return the number
    of the newest, or `after` if there is none."""
    start = index * SLOT_BYTES + RING_AT
    image = bytes(buf[start : start + RING * ENTRY_BYTES])
    found: list[tuple[int, StepValues | Mark]] = []
    for at in range(0, len(image), ENTRY_BYTES):
        if (entry := _parse_entry(image[at : at + ENTRY_BYTES], reading)) and entry[0] > after:
            found.append(entry)
    found.sort(key=lambda entry: entry[0])
    return (found[-1][0] if found else after), [one for _, one in found]


def clear_slot(buf: mmap.mmap | memoryview, index: int) -> None:
    """Empty the slot before a launch; a writer that is still alive fills it again with its own generation."""
    buf[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)


def _parse_entry(image: bytes, reading: SlotReading) -> tuple[int, StepValues | Mark] | None:
    flags, generation, number, step = VALUES.unpack_from(image, SUM.size)[:4]
    form = MARK if flags & MARKED else VALUES
    body = image[SUM.size : SUM.size + form.size]
    if SUM.unpack_from(image)[0] != crc32(body) or generation != reading.generation & 0xFFFF or not number:
        return None
    if abs(step) > MOST:
        return None
    if flags & MARKED:
        *_, value, group, count = MARK.unpack(body)
        return number, Mark(reading.rank, step, f"{group:x}", count, PARAMETERS, value)
    *_, loss, grad_norm, own_norm, update = VALUES.unpack(body)
    return number, StepValues(
        generation=reading.generation,
        rank=reading.rank,
        step=step,
        at=reading.at,
        loss=loss if flags & LOSS else None,
        grad_norm=grad_norm if flags & GRAD_NORM else None,
        own_norm=own_norm if flags & OWN_NORM else None,
        update=update if flags & UPDATE else None,
    )


def _read_failure(stored: bytes) -> str:
    """Return the text of the slot's failure, marked as cut if it fills its space."""
    text = stored.rstrip(b"\0").decode("utf-8", "ignore")
    return mark_cut(text) if stored[-1] else text


def _read_phase(stored: bytes) -> str:
    """Return the slot's phase. If it fills its space, its last word may be a part of a secret, and is left out."""
    text = stored.rstrip(b"\0").decode("ascii", "replace")
    words = text.rpartition(" ")[0].strip()
    return f"{words}{CUT}" if stored[-1] and words else text


def _is_possible(reading: SlotReading) -> bool:
    bad = (reading.first_bad_step, reading.lasting_bad_step)
    steps = (reading.step, reading.first_step, reading.loss_step, *bad, reading.origin, reading.restored)
    counts = (reading.skipped, reading.skipped_samples, reading.parameters, reading.skipped_updates)
    launched = (reading.grouped_at, reading.restoring_at, reading.restored_at, reading.set_up_at)
    instants = (reading.at, reading.first_at, *launched)
    return all(abs(number) <= MOST for number in (*steps, *counts)) and all(abs(at) <= MOST_S for at in instants)


def _parse_reading(body: bytes) -> SlotReading:
    seq, flags, step, at, loss_step, loss, grad_norm, tokens, flops = HOT.unpack_from(body)
    generation, rank, pid, first_step, first_at, first_bad_step, *rest = COLD.unpack_from(body, HOT.size)
    phase_at, failed_at, phase, failure, grouped_at, restored_at, skipped, skipped_samples, *rest = rest
    origin, parameters, lasting_bad_step, restoring_at, set_up_at, skipped_updates, restored = rest
    return SlotReading(
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
        lasting_bad_step=lasting_bad_step,
        phase=_read_phase(phase),
        phase_at=phase_at,
        failed=bool(flags & FAILED),
        failed_at=failed_at,
        failure=_read_failure(failure),
        grouped_at=grouped_at,
        restored_at=restored_at,
        restored=restored,
        restoring_at=restoring_at,
        set_up_at=set_up_at,
        skipped_updates=skipped_updates,
        skippable=bool(flags & SKIPPABLE),
        skipped=skipped,
        skipped_samples=skipped_samples,
        origin=origin,
        made_up=bool(flags & MADE_UP),
        numbered=bool(flags & NUMBERED),
        tokens=tokens if 0 <= tokens <= MOST_REAL else 0.0,
        flops=flops if 0 <= flops <= MOST_REAL else 0.0,
        parameters=parameters,
        claimed=bool(flags & CLAIMED),
        survives=bool(flags & SURVIVES),
        resizes=bool(flags & RESIZES),
        carries=bool(flags & CARRIES),
        replicated=bool(flags & REPLICATED),
        ending=next((word for flag, word in _ENDINGS.items() if flags & flag), ""),
    )
