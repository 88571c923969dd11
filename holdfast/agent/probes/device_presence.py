"""Probe of the devices: all that the node should have are present and compute correctly."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.probe_tools import CPU, accelerators, devices, integer_tensor, new_finding
from holdfast.model.probe_findings import Finding

_NUMBERS = 1 << 12


def run(asked: ProbeRequest) -> Iterator[Finding]:
    found = accelerators()
    if fault := _missing_devices(len(found)):
        yield replace(new_finding("device", CPU), place="", device="", ok=False, detail=fault)
    for device in devices():
        model = new_finding("device", device, "arithmetic")
        same = torch.equal(integer_tensor((_NUMBERS,), device, 1).cpu(), integer_tensor((_NUMBERS,), CPU, 1))
        detail = _describe_device(device) if same else "its integer arithmetic differs from the processor's"
        yield replace(model, ok=same, detail=detail)
    if found:
        # A node with seven of eight looks well by itself; beside its neighbours it does not.
        yield replace(
            new_finding("device", found[0], "count"), place="", digest=str(len(found)), detail=f"{len(found)} GPUs"
        )


def _missing_devices(seen: int) -> str:
    """Return a sentence if CUDA sees fewer devices than CUDA_VISIBLE_DEVICES names or /dev shows; else an empty one."""
    promised = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in promised.split(",") if name.strip()] if promised else []
    if names and names[0].strip() != "-1" and seen < len(names):
        return f"CUDA_VISIBLE_DEVICES={promised}, but CUDA sees {seen} devices"
    if promised is None and not seen and torch.version.cuda and Path("/dev/nvidia0").exists():
        return "/dev/nvidia0 exists, but CUDA sees no device"
    return ""


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_properties(device).total_memory / 1e9:.0f} GB"
    return f"{len(os.sched_getaffinity(0))} cores"
