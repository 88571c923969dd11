"""Probe of matrix products at full precision: repetitions, reference results and other nodes must agree bit for bit."""

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.probe_tools import devices, dtype_name, float_tensor, new_finding, tensor_digest
from holdfast.model.probe_findings import Finding

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(asked: ProbeRequest) -> Iterator[Finding]:
    for device in devices():
        size = 256 if asked.small else 768 if device.type == "cpu" else 4096
        for dtype in _TYPES[: 2 if device.type == "cpu" else None]:
            a, b = float_tensor((size, size), device, 11, dtype), float_tensor((size, size), device, 12, dtype)
            found = new_finding("gemm_bits", device, f"{dtype_name(dtype)} {size}")
            first = torch.matmul(a, b)
            again = sum(not torch.equal(torch.matmul(a, b), first) for _ in range(asked.repeats))
            detail = f"{again} of {asked.repeats} repetitions gave different bits" if again else ""
            yield replace(found, ok=not again, detail=detail, digest=tensor_digest(first))
