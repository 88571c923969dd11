"""Functions that device probes share: the list of devices, tensors made without a random generator, and digests."""

import ctypes
import hashlib
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from holdfast.model.probe_findings import Finding

CPU = torch.device("cpu")
_MASK = (1 << 31) - 1
_SPAN = 1 << 22  # numbers made at once


def make_deterministic() -> None:
    """Make torch compute the same bits each time: one thread, one order of summation. Call it before all else."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    for device in accelerators():
        torch.zeros(1, device=device)


def accelerators() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def devices() -> list[torch.device]:
    """Return all accelerators and the CPU, since a CPU can compute wrongly as well."""
    return [*accelerators(), CPU]


def new_finding(probe: str, device: torch.device, form: str = "") -> Finding:
    """Return a finding for a probe to complete; it says that nothing is wrong."""
    model, version = model_of(device), str(torch.__version__)
    return Finding(probe=probe, level=0, ok=True, place=str(device), device=model, torch=version, form=form)


def model_of(device: torch.device) -> str:
    """Return the device's model; equal models compute equal bits. A CPU's caches affect sums, so they are named too."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    rows = dict.fromkeys(("model name", "cpu family", "model", "stepping"), "")
    for line in _read_text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if not line.strip():
            break
        if name.strip() in rows:
            rows[name.strip()] = value.strip()
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    known = [rows["model name"] or platform.machine(), "-".join(list(rows.values())[1:])]
    return " ".join([*known, torch.backends.cpu.get_cpu_capability(), *(_read_text(path).strip() for path in caches)])


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def integer_tensor(shape: Sequence[int], device: torch.device, seed: int) -> torch.Tensor:
    """Return integers from 0 to 2^31, hashed from their positions, so equal in all versions and on all devices."""
    flat = torch.empty(torch.Size(shape).numel(), dtype=torch.int64, device=device)
    for start in range(0, flat.numel(), _SPAN):
        part = flat[start : start + _SPAN]
        torch.arange(start, start + part.numel(), out=part)
        part.add_(seed * 7919 + 1).mul_(1640531527).bitwise_and_(_MASK)  # no product leaves 63 bits
        for shift, factor in ((15, 739982445), (13, 695872825), (16, 1)):
            part.bitwise_xor_(part >> shift).mul_(factor).bitwise_and_(_MASK)
    return flat.view(*shape)


def float_tensor(
    shape: Sequence[int], device: torch.device, seed: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return random-looking numbers from -1 to 1 whose mantissas use every bit."""
    # 24 bits of an integer are exact in float32, and so is what follows: the same everywhere.
    return ((integer_tensor(shape, device, seed) >> 7).to(torch.float32) / (1 << 23) - 1.0).to(dtype)


def tensor_digest(*tensors: torch.Tensor) -> str:
    """Return a digest of the tensors' bytes. It works without numpy, which nothing in holdfast needs."""
    found = hashlib.sha256()
    for tensor in tensors:
        host = tensor.detach().contiguous().cpu()
        found.update((ctypes.c_ubyte * (host.numel() * host.element_size())).from_address(host.data_ptr()))
    return found.hexdigest()[:32]


def sync_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_work(device: torch.device, work: Callable[[], object], *, times: int, limit_s: float) -> list[float]:
    """Return the seconds of each run, after a warm-up that does not count; stop early when the limit passes."""
    work()
    sync_device(device)
    took: list[float] = []
    while len(took) < times and (sum(took) < limit_s or not took):
        began = time.perf_counter()
        work()
        sync_device(device)
        took.append(time.perf_counter() - began)
    return took


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
