"""Looks, as often as the agent orders, whether a collective of this process is open, and writes down what it finds.

On gloo torch counts the collectives that have been entered and that have ended. NCCL queues collectives long before the
GPU comes to them, so there the entries that have not ended are asked: one that has begun is open, or any, if torch does
not tell when they begin. Messages between ranks count where torch records them, which it does under NCCL alone.
"""

import sys
from collections.abc import Callable
from time import monotonic, thread_time
from typing import Any

from holdfast.client.training.gpu_collective_progress import has_begun, has_ended, is_of_nccl
from holdfast.client.training.torch_recorder_dumps import load_dump
from holdfast.wire.rank_memory.network_look_writer import Buffer, NetworkLookLog
from holdfast.wire.rank_memory.slot_writer import HOT, SLOT_BYTES, newest_record
from holdfast.wire.rank_memory.slot_writer import RING_AT as SLOT_RING_AT

ReadStep = Callable[[], tuple[int, float]]  # the newest step, -1 if there is none, and when it ended

_AGAIN_S = 1.0  # where there is nothing to look at yet
_ORDERS_S = 0.25  # how often an order is looked for
_SHARE = 0.005  # of a core that looks may take: dearer ones, as over NCCL, are made less often
_GOLDEN = 0.618034  # multiples of it, without their whole part, lie evenly: looks keep no time with steps


def step_reader(memory: Buffer, place: str) -> ReadStep:
    """Return what reads the newest step from the slot at `place`, "<path of the memory>:<number of the slot>"."""
    at = int(place.rpartition(":")[2]) * SLOT_BYTES

    def read() -> tuple[int, float]:
        body = newest_record(bytes(memory[at : at + SLOT_RING_AT]))
        return HOT.unpack_from(body)[2:4] if body else (-1, 0.0)

    return read


class NetworkLooks:
    def __init__(self, log: NetworkLookLog, read_step: ReadStep) -> None:
        self._log, self._read_step = log, read_step
        self._made = 0
        self._next_at = 0.0
        self._settled: dict[str, tuple[int, int]] = {}  # by group: entered and ended, at which nothing was open

    @property
    def next_at(self) -> float:
        """When the next look, or the next search for an order, is due, by the monotonic clock."""
        return self._next_at

    def look(self) -> None:
        """Make a look if one is ordered."""
        now = monotonic()
        wanted, spacing_s = self._log.read_order()
        if self._log.count >= wanted:
            self._next_at = now + _ORDERS_S
            return
        began = thread_time()
        step, begun_at = self._read_step()
        busy = self._is_busy() if step >= 0 else None
        if busy is None:
            self._next_at = now + _AGAIN_S
            return
        self._log.append_look(step, begun_at, now, busy=busy)
        self._made += 1
        least_s = (thread_time() - began) / _SHARE
        self._next_at = now + max(spacing_s, least_s) * (0.5 + self._made * _GOLDEN % 1)

    def _is_busy(self) -> bool | None:
        """Return whether a collective is open; None if there are no process groups."""
        c10d = sys.modules.get("torch._C._distributed_c10d")
        initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
        if c10d is None or initialized is None or not initialized():
            return None
        on_gpus = getattr(c10d, "_dump_nccl_trace", None)
        if on_gpus is not None and has_open_entry(load_dump(on_gpus, True, active=True)):
            return True
        counted = getattr(c10d, "_dump_fr_trace", None)
        return counted is not None and self.has_open_count(counted)

    def has_open_count(self, dump: Callable[..., bytes]) -> bool:
        """Return whether a group has entered more collectives than have ended. Gloo ends them in any order, and torch
        counts up to the one that has ended last; so where its counts differ, the entries tell."""
        statuses = load_dump(dump, False).get("pg_status", {})
        found = {
            group: (status["last_enqueued_collective"], status["last_completed_collective"])
            for group, status in statuses.items()
            if status["last_enqueued_collective"] > max(0, status["last_completed_collective"])
        }
        if all(self._settled.get(group) == counts for group, counts in found.items()):
            return False
        entries = load_dump(dump, True).get("entries", ())
        still = {str(e.get("pg_id")) for e in entries if not e["is_p2p"] and not has_ended(e)}
        self._settled = {group: counts for group, counts in found.items() if str(group) not in still}
        return len(self._settled) < len(found)


def has_open_entry(dump: dict[str, Any]) -> bool:
    """Return whether a collective or a message of NCCL is on the network, as far as its entries tell."""
    entries = [e for e in dump.get("entries", ()) if is_of_nccl(e) and not has_ended(e)]
    if not entries:
        return False
    statuses = dump.get("pg_status", {}).values()
    timed = any(e.get("time_discovered_started_ns") for e in entries) or any(
        status["last_started_collective"] > 0 for status in statuses
    )
    return not timed or any(map(has_begun, entries))
