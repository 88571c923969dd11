"""The peak FLOP/s of a node's ranks, from the names of its GPUs and a table."""

from collections.abc import Iterable, Sequence

import msgspec


class GpuPeak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table of GPUs: their names and their peak."""

    names: tuple[str, ...]  # as NVML gives them
    flops: float  # a second
    source: str


def peak_of_ranks(ranks: int, sharing: int, gpus: Sequence[str], rows: Iterable[GpuPeak]) -> float:
    """Return the peak FLOP/s of the GPUs of this many ranks; 0 if unknown. `gpus` names the host's GPUs, and `sharing`
    is the number of ranks on the host. The peak is unknown if the host has different GPUs, or fewer GPUs than ranks."""
    if len(set(gpus)) != 1 or sharing > len(gpus):
        return 0.0
    return next((ranks * row.flops for row in rows if gpus[0] in row.names), 0.0)
