"""Probe of nearly all free memory of every device, piece by piece, and of a part of the host's memory."""

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.device_memory import check_patterns, word_tensor
from holdfast.agent.probes.probe_tools import CPU, accelerators, new_finding
from holdfast.model.probe_findings import Finding

_PIECE = 2 << 30
_PART = 0.9  # of what is free; comparing takes some itself
_HOST = 256 << 20


def run(asked: ProbeRequest) -> Iterator[Finding]:
    for device in accelerators():
        yield _check_device(device, _PIECE >> 5 if asked.small else _PIECE, 1 if asked.small else 1 << 20)
    size = 16 << 20 if asked.small else _HOST
    yield replace(new_finding("memory_whole", CPU), form=f"{size >> 20} MiB", **check_patterns(word_tensor(CPU, size)))


def _check_device(device: torch.device, piece: int, most: int) -> Finding:
    """Check a device's free memory piece by piece. Each piece stays allocated, so that the next one is other memory."""
    torch.cuda.empty_cache()  # what earlier probes had is free
    found = new_finding("memory_whole", device)
    free, total = torch.cuda.mem_get_info(device)
    pieces = min(most, int(free * _PART) // piece - 2)  # two for comparing
    kept: list[torch.Tensor] = []
    for number in range(pieces):
        kept.append(word_tensor(device, piece))
        result = check_patterns(kept[-1])
        if not result["ok"]:
            return replace(found, ok=False, detail=f"{result['detail']}, in piece {number} of {pieces}")
    kept.clear()
    torch.cuda.empty_cache()
    if pieces < 1:
        return replace(found, ok=None, detail=f"{free / 1e9:.1f} GB are free, too little for this probe")
    return replace(found, detail=f"{pieces * piece / 1e9:.0f} of {total / 1e9:.0f} GB")
