"""Finds how far a rank's GPU has come in the collectives that the rank has entered, from torch's flight recorder.

Under NCCL a process only queues collectives, and may be far ahead of its GPU. With TORCH_NCCL_ENABLE_TIMING=1 the
recorder shows which collectives have begun on the GPU. Other backends, and NCCL without timing, do not show this; the
GPU's progress is then unknown.
"""

import sys
from typing import Any

from holdfast.wire.rank_memory.flight_log_writer import NAME_CHARS, GpuState

Entry = dict[str, Any]  # of torch's recorder
Dump = dict[str, Any]
PgStatus = dict[str, int]  # last_enqueued_collective, last_started_collective, last_completed_collective


_STARTED = "last_started_collective"  # -1 until one has told that it has begun
_ALL_WAIT = ("all_reduce", "all_gather", "reduce_scatter")  # in whose names; a root, or who gets nothing, does not wait


class UnbegunTime:
    """Measures how long operations were ready to begin on a GPU while it did other work."""

    def __init__(self) -> None:
        self.ended_at = 0.0  # the newest that has ended
        self.longest_s = 0.0

    def note_end(self, entry: Entry) -> None:
        """Note when this operation ended, and how long it was ready to begin while the GPU did other work."""
        took_ms, seen_ns = entry.get("duration_ms"), entry.get("time_discovered_completed_ns")
        if took_ms is None or not seen_ns or seen_ns / 1e9 <= self.ended_at:
            return
        began_at = seen_ns / 1e9 - took_ms / 1e3
        waited_s = began_at - max(self.ended_at, entry["time_created_ns"] / 1e9)
        self.ended_at, self.longest_s = seen_ns / 1e9, max(self.longest_s, waited_s)

    def since(self, first: Entry | None, ended_at: float = 0.0) -> float:
        """Return when the next operation, `first`, became ready to begin on the GPU; 0 if `first` is None. `ended_at`
        is the end of the newest message if `first` is a collective, and the other way round."""
        return round(max(self.ended_at, ended_at, first["time_created_ns"] / 1e9), 3) if first else 0.0


class GpuProgress:
    """The GPU's progress in one process group. Keeps two values after torch's flight recorder has dropped their
    entries: when the newest collective ended, and the longest wait before one began."""

    def __init__(self) -> None:
        self.timed = False  # it is told when collectives begin
        self.unbegun = UnbegunTime()

    def on_entries(self, entries: list[Entry], status: PgStatus | None, timed: bool = False) -> GpuState | None:
        """Return how far the GPU has come, or None if torch does not show it. `status` has torch's own counts, or is
        None because they include messages. `timed` says that torch shows the GPU's progress in another group."""
        ordered = sorted(entries, key=lambda e: (e["collective_seq_id"], e["record_id"]))
        self.timed = self.timed or timed or tells_start(ordered, status)
        if not self.timed or not is_of_nccl(ordered[-1]):
            return None
        for entry in ordered:
            self.unbegun.note_end(entry)
        begun = [e for e in ordered if has_begun(e)]
        if begun:
            started = begun[-1]["collective_seq_id"]
        elif status is not None:
            started = max(0, status[_STARTED])
        else:
            return None
        first = next((e for e in ordered if e["collective_seq_id"] > started), None)
        longest_s = round(self.unbegun.longest_s, 3)
        return started, operation_name(begun[-1]) if begun else "", self.unbegun.since(first), longest_s


def tells_start(entries: list[Entry], status: PgStatus | None) -> bool:
    """Return whether the recorder shows at least one NCCL collective as begun on the GPU."""
    if not all(map(is_of_nccl, entries)):
        return False
    return any(e.get("time_discovered_started_ns") for e in entries) or (status is not None and status[_STARTED] > 0)


def last_completed(entries: list[Entry], status: PgStatus | None) -> int:
    """Return the number of the newest collective that has ended and before which no collective is open."""
    still = [e["collective_seq_id"] for e in entries if not has_ended(e)]
    numbers = [e["collective_seq_id"] for e in entries]
    if not still:
        return int(max(numbers))
    if status is None or min(still) > min(numbers):
        return int(min(still)) - 1
    return min(int(min(still)) - 1, max(0, status["last_completed_collective"]))  # older open ones have left the buffer


def idle_gpu(entered: int, op: str, gpu: GpuState | None, status: PgStatus | None) -> tuple[int, GpuState | None]:
    """Return the last completed collective and the GPU's progress in a group whose entries have left torch's buffer."""
    if gpu is None or status is None or status["last_completed_collective"] >= entered:
        return entered, gpu and (entered, op, 0.0, gpu[3])
    started = max(gpu[0], status[_STARTED])
    return max(0, status["last_completed_collective"]), (started, gpu[1] if started == gpu[0] else "", gpu[2], gpu[3])


def operation_name(entry: Entry) -> str:
    """Return what the entry does, such as `all_reduce`."""
    return str(entry["profiling_name"]).rpartition(":")[2][:NAME_CHARS]


def has_begun(entry: Entry) -> bool:
    """Return whether this entry's operation has begun on the GPU, as far as NCCL's recorder knows."""
    return bool(entry["retired"]) or entry["state"] != "scheduled"


def has_ended(entry: Entry) -> bool:
    """Return whether this entry's operation has ended. gloo marks an ended operation as retired, not as completed."""
    return bool(entry["retired"]) or entry["state"] == "completed"


def is_of_nccl(entry: Entry) -> bool:
    return str(entry["profiling_name"]).startswith("nccl:")


def held_gpu_s(entry: Entry) -> float | None:
    """Return how many seconds a collective held the GPU; None if unknown, 0 where not every rank has to wait."""
    took_ms = entry.get("duration_ms")
    if not took_ms:
        return None
    return round(took_ms / 1e3, 6) if any(op in entry["profiling_name"] for op in _ALL_WAIT) else 0.0


def find_gpu(local_rank: str) -> str:
    """Return the UUID of the GPU that this process uses. If it uses several, return that of the GPU whose number is the
    local rank. Return "" if torch names no such GPU."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if torch is None or cuda is None or not cuda.is_initialized():
        return ""
    try:
        used = [number for number in range(cuda.device_count()) if torch._C._cuda_hasPrimaryContext(number)]
        found = used if len(used) == 1 else [number for number in used if str(number) == local_rank]
        return str(cuda.get_device_properties(found[0]).uuid)[:NAME_CHARS] if found else ""
    except (AttributeError, RuntimeError):  # of a torch that does not tell, or a broken driver
        return ""
