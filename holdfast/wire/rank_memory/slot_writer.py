"""Writes a rank's progress slot: the few numbers that it reports to its node, in memory that outlives the rank.

A slot has two records, written in turn, each with a checksum. A reader takes the newest record that is whole. So a rank
that dies in the middle of a write still shows its previous record, and no memory barriers are needed, which Python does
not have. A ring after the records keeps the values of the last steps for readers that look only now and then. Every
training script imports this module, so it imports little.
"""

import fcntl
import mmap
import os
import struct
from math import isfinite, nan
from time import monotonic
from zlib import crc32

from holdfast.wire.progress_environment import GENERATION, SLOT

RECORD_BYTES = 360
RING_AT = 2 * RECORD_BYTES
RING, ENTRY_BYTES = 16, 64
SLOT_BYTES = RING_AT + RING * ENTRY_BYTES

SUM = struct.Struct("<I")
HOT = struct.Struct("<QIqdqdddd")  # seq, flags, step, at, loss_step, loss, grad_norm, tokens, flops
COLD = struct.Struct(
    "<qiiqdqdd24s120sddQQqqqddQq"
)  # generation, rank, pid, first step and at, first bad step, the rest
BODY = slice(SUM.size, SUM.size + HOT.size + COLD.size)
PHASE_BYTES = 24
_MOST = 1 << 62
FAILURE_BYTES = 120

VALUES = struct.Struct("<HHQqdddd")  # flags, generation, number, step, loss, grad_norm, own_norm, update
MARK = struct.Struct("<HHQqQQI")  # the same up to the step; then hash, group and count

COUNTED, LOSS, GRAD_NORM, FAILED = 1, 2, 4, 8
OWN_NORM, UPDATE, MARKED, SKIPPABLE = 16, 32, 64, 128
CLAIMED, RETURNED = 256, 512  # somebody makes the rank's steps; its script is over
PARTING, PARTED = 1024, 2048  # the script destroys its process groups; it has none left
NUMBERED = 8192  # a first step that was counted has the number that the job's steps have
MADE_UP = 4096  # the optimizer's count has a step that torch made only to create its state
SURVIVES = 16384  # the rank can go on in its process when another one fails
CARRIES = 65536  # the job's state lives in the ranks, and those that survive bring it to the others
RESIZES = 32768  # its whole state is on every rank, and its script goes on with any number of ranks
REPLICATED = 131072  # each of several ranks has the whole state


class SlotWriter:
    """Writes one rank's slot in one generation, from one process only: the rank, or a child that makes its steps."""

    def __init__(
        self, buf: mmap.mmap | memoryview, index: int, *, generation: int, rank: int, heir: bool = False
    ) -> None:
        """Start to write the slot. With `heir`, continue from the record of another process of the same rank."""
        self._buf = buf
        self._at = index * SLOT_BYTES
        before = newest_record(bytes(buf[self._at : self._at + RING_AT]))
        self._seq: int = HOT.unpack_from(before)[0] if before else 0
        if self._seq > _MOST:  # no rank has written so often: it is nothing of ours, and must not stay the newest
            buf[self._at : self._at + RING_AT] = bytes(RING_AT)
            self._seq = 0
        self._flags = 0
        self._step = self._loss_step = self._first_step = self._first_bad_step = self._lasting_bad_step = -1
        self._bad_step = -1  # of the newest loss, if it is not finite
        self._step_at = monotonic()
        self._first_at = 0.0
        self._loss = self._grad_norm = nan
        self._tokens = self._flops = 0.0  # of all steps since the launch
        self._owner = (generation, rank, os.getpid())
        self._told = 0  # entries of the ring
        self._phase, self._phase_at = b"", 0.0
        self._failure, self._failed_at = b"", 0.0
        self._grouped_at = self._restoring_at = self._restored_at = self._set_up_at = 0.0
        self._skipped = self._skipped_samples = 0
        self._origin = self._restored = -1
        self._parameters = 0
        self._skipped_updates = 0  # in a row, by a GradScaler
        self._passed = -1  # first step that was left out, if no step came before it
        if heir and before:
            self._inherit_record(before)
        self._pack_cold_part()
        self._write_record()

    @classmethod
    def open(cls, path: str, index: int, *, generation: int, rank: int) -> "SlotWriter":
        return cls(open_slot_memory(path), index, generation=generation, rank=rank)

    @property
    def phase(self) -> str:
        return self._phase.decode("ascii")

    @property
    def counted_steps(self) -> int:
        """Steps that holdfast has counted so far; 0 if the script reports its steps itself."""
        return max(0, self._step) if self._flags & COUNTED else 0

    def claim_steps(self) -> None:
        """Record that this process makes the rank's steps from now on."""
        if self._is_ours():
            self._flags |= CLAIMED
            self._pack_cold_part()
            self._write_record()

    def step(self, step: int, *, counted: bool = False) -> None:
        """Record a finished step. The script's first own report replaces a first step that holdfast `counted`."""
        self._step, self._step_at = step, monotonic()
        if self._first_step < 0 or (self._flags & COUNTED and not counted):
            # What was left out before it came first all the same: the state is that of the step before.
            self._first_step = step if self._passed < 0 else min(step, self._passed)
            self._first_at = self._step_at
            self._pack_cold_part()
        self._flags = self._flags | COUNTED if counted else self._flags & ~COUNTED
        self._write_record()

    def remember_first_step(self, step: int, *, numbered: bool) -> None:
        """Record the first step that holdfast counted, but no newest step, because the script may still report its own
        number. With `numbered`, `step` is the job's step number; without, it counts from the launch."""
        self._first_step, self._first_at = step, monotonic()
        self._flags |= COUNTED | NUMBERED * numbered
        self._pack_cold_part()
        self._write_record()

    def resume_from(self, step: int, *, made_up: bool = False) -> None:
        """Record the number of steps made before the first counted step; the next write shows it. `made_up` says that
        this number includes a step that torch made only to create the optimizer's state."""
        self._origin = step
        self._flags |= MADE_UP * made_up
        self._pack_cold_part()

    def add_work(self, tokens: float, flops: float) -> None:
        """Add the tokens and FLOPs of a step to the sums in the next record."""
        self._tokens, self._flops = self._tokens + tokens, self._flops + flops

    def note_parameters(self, count: int) -> None:
        """Record how many parameters the script trains; the next write shows it."""
        self._parameters = count
        self._pack_cold_part()

    def write_values(
        self,
        step: int,
        loss: float | None,
        grad_norm: float | None,
        own_norm: float | None = None,
        update: float | None = None,
    ) -> None:
        """Append a step's values to the ring, and keep the loss and the gradient norm for the next record."""
        self._flags &= ~(LOSS | GRAD_NORM)
        self._loss_step, self._loss, self._grad_norm = step, nan, nan
        if loss is not None:
            self._flags |= LOSS
            self._loss = loss
            self._judge_loss(step, loss)
        if grad_norm is not None:
            self._flags |= GRAD_NORM
            self._grad_norm = grad_norm
        flags = self._flags & (LOSS | GRAD_NORM)
        if own_norm is not None or update is not None:
            flags |= (OWN_NORM if own_norm is not None else 0) | (UPDATE if update is not None else 0)
        more = (nan if own_norm is None else own_norm, nan if update is None else update)
        self._told += 1
        self._append_entry(
            VALUES.pack(flags, self._owner[0] & 0xFFFF, self._told, step, self._loss, self._grad_norm, *more)
        )

    def _judge_loss(self, step: int, loss: float) -> None:
        """Record the first step whose loss is not finite, and the first of two consecutive ones. Both stay in the
        record, so that a reader that looks only now and then sees them."""
        before, self._bad_step = self._bad_step, -1 if isfinite(loss) else step
        if self._bad_step >= 0 and self._lasting_bad_step < 0:
            self._lasting_bad_step = before if before != step else -1
            self._first_bad_step = step if self._first_bad_step < 0 else self._first_bad_step
            self._pack_cold_part()

    def show_values(self) -> None:
        """Write the values that were recorded last, without waiting for the next step."""
        self._write_record()

    def write_hash(self, step: int, value: int, group: int, count: int) -> None:
        """Record a hash of the state that this rank shares with its group."""
        self._told += 1
        self._append_entry(MARK.pack(MARKED, self._owner[0] & 0xFFFF, self._told, step, value, group, count))

    def _append_entry(self, body: bytes) -> None:
        at = self._at + RING_AT + self._told % RING * ENTRY_BYTES
        self._buf[at : at + SUM.size + len(body)] = SUM.pack(crc32(body)) + body

    @property
    def is_loss_bad(self) -> bool:
        """Return whether the newest loss is not finite."""
        return bool(self._flags & LOSS) and not isfinite(self._loss)

    def enter_phase(self, phase: str) -> None:
        """Record that the rank is in this phase from now on."""
        if self._is_ours():
            self._phase, self._phase_at = phase.encode("ascii", "replace")[:PHASE_BYTES], monotonic()
            self._pack_cold_part()
            self._write_record()

    def write_failure(self, text: str) -> None:
        """Record the failure by which the rank is about to end; the first failure stays."""
        if self._flags & FAILED:
            return
        self._is_ours(whoever=True)
        self._flags |= FAILED
        self._failure, self._failed_at = text.encode("utf-8", "replace")[:FAILURE_BYTES], monotonic()
        self._pack_cold_part()
        self._write_record()

    def mark_grouped(self) -> None:
        """Record when the rank first had its process group."""
        if not self._grouped_at and self._is_ours():
            self._grouped_at = monotonic()
            self._pack_cold_part()
            self._write_record()

    def mark_restored(self, took_s: float, step: int = -1) -> None:
        """Record that the rank has restored the state of `step`, or found none (0), and how many seconds that took."""
        if self._is_ours():
            self._restored, self._restored_at = step, monotonic()
            self._restoring_at = self._restored_at - took_s
            self._pack_cold_part()
            self._write_record()

    def note_set_up(self, imported_at: float, set_up_at: float) -> None:
        """Remember when the script was last seen setting up, for the record of the first step. If it imported modules
        after its process group was made, date the group to the last import, unless restoring began earlier."""
        if self._grouped_at < imported_at and self._grouped_at and not 0 < self._restoring_at < imported_at:
            self._grouped_at = imported_at
        self._set_up_at = set_up_at

    def note_skipped_updates(self, count: int) -> None:
        """Record how many of the newest updates in a row were skipped because gradients were not finite."""
        self._skipped_updates = count
        self._pack_cold_part()
        self._write_record()

    def mark_skippable(self) -> None:
        """Record that the script asks holdfast which batches to skip."""
        self._set_flag(SKIPPABLE)

    def mark_survives(self, yes: bool) -> None:
        """Record whether this process can go on when another rank fails."""
        self._set_flag(SURVIVES, yes)

    def mark_resizes(self) -> None:
        """Record that this rank can go on among more or fewer ranks, with the same batch."""
        self._set_flag(RESIZES)

    def mark_replicated(self) -> None:
        """Record that the job has several ranks, and that each of them has the whole state of the job."""
        self._set_flag(REPLICATED)

    def mark_carries(self) -> None:
        """Record that this rank keeps its state in its process and sends it to other ranks, so none needs a restore."""
        self._set_flag(CARRIES)

    def mark_returned(self) -> None:
        """Record that the script has returned without failure; only the interpreter's own exit is left."""
        self._set_flag(RETURNED)

    def mark_parting(self, ending: str) -> None:
        """Record that the script destroys a process group ("parting"), has none left ("parted") or has some ("")."""
        self._set_flag(PARTING, ending == "parting")
        self._set_flag(PARTED, ending == "parted")

    def _set_flag(self, flag: int, yes: bool = True) -> None:
        if self._is_ours():
            self._flags = self._flags | flag if yes else self._flags & ~flag
            self._pack_cold_part()
            self._write_record()

    def _is_ours(self, *, whoever: bool = False) -> bool:
        """Return whether this process may write the slot. Another live process that has claimed the slot prevents this,
        unless `whoever` is set. If an earlier process left a record, take it over before returning True."""
        body = newest_record(bytes(self._buf[self._at : self._at + RING_AT]))
        if body is None or COLD.unpack_from(body, HOT.size)[:3] == self._owner:
            return True
        ours = whoever or not is_claimed(body)
        if ours:
            self._inherit_record(body)
            self._pack_cold_part()
        return ours

    def _inherit_record(self, body: bytes) -> None:
        """Continue from the record of another process of the rank."""
        self._seq, flags, *hot = HOT.unpack_from(body)
        self._flags = flags & ~CLAIMED
        self._step, self._step_at, self._loss_step, self._loss, self._grad_norm, self._tokens, self._flops = hot
        self._first_step, self._first_at, self._first_bad_step, *rest = COLD.unpack_from(body, HOT.size)[3:]
        self._phase_at, self._failed_at, phase, failure, *rest = rest
        self._phase, self._failure = phase.rstrip(b"\0"), failure.rstrip(b"\0")
        self._grouped_at, self._restored_at, self._skipped, self._skipped_samples, *rest = rest
        self._origin, self._parameters, self._lasting_bad_step, *rest = rest
        self._restoring_at, self._set_up_at, self._skipped_updates, self._restored = rest
        self._bad_step = self._loss_step if self.is_loss_bad else -1

    def note_skip(self, step: int, batches: int, samples: int) -> None:
        """Record that this step was skipped, and the batches and samples skipped so far; the next write shows both."""
        if self._first_step < 0 and self._passed < 0:
            self._passed = step
        self._skipped, self._skipped_samples = batches, samples
        self._pack_cold_part()

    def _pack_cold_part(self) -> None:
        first = (self._first_step, self._first_at, self._first_bad_step)
        rest = (self._phase_at, self._failed_at, self._phase, self._failure, self._grouped_at, self._restored_at)
        last = (self._skipped, self._skipped_samples, self._origin, self._parameters, self._lasting_bad_step)
        ways = (self._restoring_at, self._set_up_at, self._skipped_updates, self._restored)
        self._cold = COLD.pack(*self._owner, *first, *rest, *last, *ways)

    def _write_record(self) -> None:
        self._seq = seq = self._seq + 1
        values = (self._loss_step, self._loss, self._grad_norm, self._tokens, self._flops)
        hot = HOT.pack(seq, self._flags, self._step, self._step_at, *values)
        body = hot + self._cold
        at = self._at + (seq & 1) * RECORD_BYTES
        # One assignment, so that threads of this process cannot interleave inside a record.
        self._buf[at : at + BODY.stop] = SUM.pack(crc32(body)) + body


def newest_record(image: bytes) -> bytes | None:
    """Return the body of the newest whole record in a slot's bytes, or None."""
    halves = image[:RECORD_BYTES], image[RECORD_BYTES:RING_AT]
    whole = [half[BODY] for half in halves if SUM.unpack_from(half)[0] == crc32(half[BODY])]
    return max(whole, key=lambda body: HOT.unpack_from(body)[0], default=None)


def record_owner(body: bytes) -> tuple[int, int, int]:
    """Return generation, rank and pid of the process that wrote the record."""
    generation, rank, pid, *_ = COLD.unpack_from(body, HOT.size)
    return generation, rank, pid


def is_claimed(body: bytes) -> bool:
    """Return whether the writer of the record makes the rank's steps and is alive."""
    return was_claimed(body) and is_alive(record_owner(body)[2])


def was_claimed(body: bytes) -> bool:
    """Return whether the writer of the record made the rank's steps, even if it has ended since."""
    return bool(HOT.unpack_from(body)[1] & CLAIMED)


def is_alive(pid: int) -> bool:
    """Return whether a process of this pid exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


class SlotBusy(Exception):
    """Another process is claiming the slot at this moment."""


def claim_slot(path: str, index: int, generation: int, mine: SlotWriter | None) -> SlotWriter | None:
    """Claim the slot for a process that is about to make its rank's first step; return None if another process has it.

    `mine` is the writer of the rank's own process; a child passes None. Raise SlotBusy if two processes try at once.
    """
    at = index * SLOT_BYTES
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, SLOT_BYTES, at)
        arena = mmap.mmap(fd, 0)
        body = newest_record(arena[at : at + RING_AT])
        told = record_owner(body) if body else (generation, 0, 0)
        if told[0] != generation or (body and told[2] != os.getpid() and is_claimed(body)):
            return None
        if body is None and mine is None:
            return None  # a child of nobody
        slot = mine or SlotWriter(arena, index, generation=generation, rank=told[1], heir=True)
        slot.claim_steps()
        return slot
    except BlockingIOError:
        raise SlotBusy from None
    finally:
        os.close(fd)


def open_slot_memory(path: str) -> mmap.mmap:
    """Map the memory that holds all slots of a node."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def open_own_slot(environ: "os._Environ[str]") -> SlotWriter | None:
    """Open the slot that this process's environment names; None if it names none or this is a child of the rank."""
    place = environ.get(SLOT)
    if not place:
        return None
    path, _, number = place.rpartition(":")
    index, generation, rank = int(number), int(environ.get(GENERATION, 0)), int(environ.get("RANK", 0))
    arena = open_slot_memory(path)
    image = arena[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]
    if len(image) < SLOT_BYTES:
        raise ValueError(f"{place} has no slot {index}")
    before = newest_record(image[:RING_AT])
    told = record_owner(before) if before else (0, 0, 0)
    if before and told[0] == generation and told[2] != os.getpid() and (was_claimed(before) or is_alive(told[2])):
        return None  # the environment is inherited; this is some child of the rank
    return SlotWriter(arena, index, generation=generation, rank=rank)
