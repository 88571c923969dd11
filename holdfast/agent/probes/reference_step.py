"""Probe of one training step of a small model on every device: loss, gradients and parameters must repeat exactly."""

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.minigpt_model import MiniGptForm, train_step
from holdfast.agent.probes.probe_tools import devices, new_finding, same_bits, tensor_digest
from holdfast.model.probe_findings import Finding


def run(asked: ProbeRequest) -> Iterator[Finding]:
    for device in devices():
        sizes = (64, 2, 32) if asked.small else (128, 2, 64) if device.type == "cpu" else (1024, 4, 256)
        for form in forms_of_size(*sizes):
            yield _compare_steps(device, form, asked.repeats)


def forms_of_size(width: int, layers: int, length: int) -> tuple[MiniGptForm, ...]:
    """Return the model in float32, in bfloat16, and in bfloat16 with experts."""
    plain = MiniGptForm(width=width, layers=layers, length=length)
    half = replace(plain, dtype=torch.bfloat16)
    return plain, half, replace(half, width=max(64, width // 2), experts=4)


def _compare_steps(device: torch.device, form: MiniGptForm, repeats: int) -> Finding:
    """Repeat the step and compare its bits with the first run's. This shows rare errors without a second device."""
    found = new_finding("reference", device, str(form))
    try:
        first = train_step(form, device)
        other = [n for n in range(repeats) if not same_bits(first, train_step(form, device))]
    except RuntimeError as e:
        if "deterministic" not in str(e):
            raise
        return replace(found, ok=None, detail=str(e).splitlines()[0])  # of this version of torch, not of this machine
    finite = bool(torch.stack([t.isfinite().all() for t in first]).all())
    detail = f"{len(other)} of {repeats} repetitions gave different bits, first number {other[0] + 1}" if other else ""
    if not finite:
        detail = "the training step gave a value that is not finite"
    return replace(found, ok=finite and not other, detail=detail, digest=tensor_digest(*first))
