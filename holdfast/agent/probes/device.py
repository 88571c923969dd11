"""The devices are there, all of them, and take work."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

from holdfast.agent.probes import Asked
from holdfast.agent.probes.bench import CPU, accelerators, devices, named, whole
from holdfast.model.probe import Finding

_NUMBERS = 1 << 12


def run(asked: Asked) -> Iterator[Finding]:
    found = accelerators()
    if fault := _missing(len(found)):
        yield replace(named("device", CPU), place="", device="", ok=False, detail=fault)
    for device in devices():
        model = named("device", device, "arithmetic")
        same = torch.equal(whole((_NUMBERS,), device, 1).cpu(), whole((_NUMBERS,), CPU, 1))
        detail = _told(device) if same else "it hashes integers to others than the processor does"
        yield replace(model, ok=same, detail=detail)
    if found:
        # A node with seven of eight looks well by itself; beside its neighbours it does not.
        yield replace(named("device", found[0], "count"), place="", digest=str(len(found)), detail=f"{len(found)} GPUs")


def _missing(seen: int) -> str:
    """What the environment or the driver promises and CUDA does not have."""
    promised = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in promised.split(",") if name.strip()] if promised else []
    if names and names[0].strip() != "-1" and seen < len(names):
        return f"CUDA_VISIBLE_DEVICES={promised}, but CUDA has {seen}"
    if promised is None and not seen and torch.version.cuda and Path("/dev/nvidia0").exists():
        return "there is /dev/nvidia0, but CUDA has no device"
    return ""


def _told(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_properties(device).total_memory / 1e9:.0f} GB"
    return f"{len(os.sched_getaffinity(0))} cores"
