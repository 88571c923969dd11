"""Products of matrices with every bit in use, compared bit for bit: with themselves, golden ones, neighbours."""

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from holdfast.agent.probes import Asked
from holdfast.agent.probes.bench import devices, digest, dtype_name, named, real
from holdfast.model.probe import Finding

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(asked: Asked) -> Iterator[Finding]:
    for device in devices():
        size = 256 if asked.small else 768 if device.type == "cpu" else 4096
        for dtype in _TYPES[: 2 if device.type == "cpu" else None]:
            a, b = real((size, size), device, 11, dtype), real((size, size), device, 12, dtype)
            found = named("gemm_bits", device, f"{dtype_name(dtype)} {size}")
            first = torch.matmul(a, b)
            again = sum(not torch.equal(torch.matmul(a, b), first) for _ in range(asked.repeats))
            detail = f"{again} of {asked.repeats} repetitions gave other bits" if again else ""
            yield replace(found, ok=not again, detail=detail, digest=digest(first))
