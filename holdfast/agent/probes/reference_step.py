"""Probe of one training step of a small model on every device: loss, gradients and parameters must agree."""

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.minigpt_model import train_step
from holdfast.agent.probes.probe_tools import devices, new_finding, same_bits, tensor_digest
from holdfast.model.probe import Finding


def run(asked: ProbeRequest) -> Iterator[Finding]:
    for device in devices():
        sizes = (64, 2, 32) if asked.small else (128, 2, 64) if device.type == "cpu" else (1024, 4, 256)
        yield _compare_steps(device, sizes, asked.repeats)


def _compare_steps(device: torch.device, sizes: tuple[int, int, int], repeats: int) -> Finding:
    """Repeat the step and compare all bits with the first one's. This shows a rare fault without a second device."""
    found = new_finding("reference", device, "x".join(map(str, sizes)))
    try:
        first = train_step(*sizes, device)
        other = [n for n in range(repeats) if not same_bits(first, train_step(*sizes, device))]
    except RuntimeError as e:
        if "deterministic" not in str(e):
            raise
        return replace(found, ok=None, detail=str(e).splitlines()[0])  # of this version of torch, not of this machine
    finite = bool(torch.stack([t.isfinite().all() for t in first]).all())
    detail = f"{len(other)} of {repeats} repetitions gave different bits, first number {other[0] + 1}" if other else ""
    if not finite:
        detail = "the training step gave a value that is not finite"
    return replace(found, ok=finite and not other, detail=detail, digest=tensor_digest(*first))
