"""Probe of every device's memory: writes patterns and reads them back."""

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.probe_tools import devices, new_finding
from holdfast.model.probe_findings import Finding

_PATTERNS = (0, -1, 0x5555_5555_5555_5555, -0x5555_5555_5555_5556)


def run(asked: ProbeRequest) -> Iterator[Finding]:
    for device in devices():
        size = 8 << 20 if asked.small else 64 << 20 if device.type == "cpu" else 512 << 20
        yield replace(new_finding("memory", device, f"{size >> 20} MiB"), **check_patterns(word_tensor(device, size)))


def word_tensor(device: torch.device, size: int) -> torch.Tensor:
    return torch.empty(size // 8, dtype=torch.int64, device=device)


def check_patterns(piece: torch.Tensor) -> dict[str, object]:
    """Test whether this memory keeps patterns, and each word's own index. Return `ok`; if not, also `detail`."""
    for pattern in _PATTERNS:
        piece.fill_(pattern)
        if wrong := int((piece != pattern).count_nonzero()):
            return {"ok": False, "detail": f"{wrong} words lost the pattern {pattern & (1 << 64) - 1:#x}"}
    torch.arange(len(piece), out=piece)
    if wrong := int((piece != torch.arange(len(piece), device=piece.device)).count_nonzero()):
        return {"ok": False, "detail": f"{wrong} words lost their own index"}
    return {"ok": True}
