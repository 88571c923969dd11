"""Hashes this rank's parameters to compare them with its replicas', for scripts that take no snapshots.

The hash is taken between steps, in `holdfast.step`. Every bit counts: words are summed as integers and tensors are
weighted with odd factors, so no single flip can vanish; several flips cancel with a chance of about 2^-32.
"""

import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import torch
import torch.distributed as dist

from holdfast.core.detect.replica import ReplicaLimits, hash_stride
from holdfast.wire.rank_memory.slot_writer import SlotWriter

_ODD = 0x9E3779B97F4A7C15  # of a 64-bit number, any odd one will do
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class ParameterHash:
    """Hashes the tensors that the ranks of a group share."""

    def __init__(self, tensors: Iterable[torch.Tensor], group: "dist.ProcessGroup | None", every: int) -> None:
        ranks = tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))
        self._group = int.from_bytes(blake2b(repr(ranks).encode(), digest_size=8).digest(), "little")
        self._count = len(ranks)
        self._tensors = list(tensors)
        self._limits = ReplicaLimits(every=every)
        self._stride = every
        self._cost_s = 0.0
        self._last: tuple[int, float] | None = None  # step and time of the last mark
        self._coming: tuple[int, torch.Tensor, torch.cuda.Event] | None = None

    def on_step(self, slot: SlotWriter, step: int) -> None:
        """Hash the tensors if this step is due; called after the step and before the next."""
        if self._coming and self._coming[2].query():
            slot.write_hash(self._coming[0], int(self._coming[1]) & (2**64 - 1), self._group, self._count)
            self._coming = None
        if self._stride <= 0 or step % self._stride or self._coming:
            return
        began_at = time.perf_counter()
        value = self.compute_hash()
        if value.is_cuda:
            into = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            self._coming = step, into, done
        else:
            slot.write_hash(step, int(value) & (2**64 - 1), self._group, self._count)
        self._adjust_stride(step, began_at)

    def compute_hash(self) -> torch.Tensor:
        return hash_tensors(self._tensors)

    def _adjust_stride(self, step: int, began_at: float) -> None:
        """Set how many steps lie between hashes, so that hashing takes no more than its allowed share of the time."""
        now = time.perf_counter()
        before, self._last = self._last, (step, now)
        self._cost_s = now - began_at
        if before and step > before[0]:
            self._stride = hash_stride(self._limits, self._cost_s, (now - before[1]) / (step - before[0]))


def hash_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an integer that changes if any single bit of the tensors flips. The order of summation has no effect."""
    with torch.no_grad():
        sums = torch.stack([_sum_words(_own_shard(tensor)) for tensor in tensors])
    factors = [_to_signed((2 * place + 1) * _ODD) for place in range(len(tensors))]
    return (sums * torch.tensor(factors, device=sums.device)).sum()


def _own_shard(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def _sum_words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1)
    size = tensor.element_size()
    if not tensor.is_cuda and flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0:
        size = 8
    return flat.view(_WORDS[size]).sum(dtype=torch.int64)


def _to_signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >> 63 else number
