"""Probe that multiplies small integer matrices. The product is exact, so judging it needs no golden result.

The check does not compute the product again. It compares (AB)x with A(Bx) for a vector x of nonzero numbers, and both
are exact in float64. One wrong number in a row of the product AB makes this row of the results differ.
"""

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.probe_tools import CPU, devices, dtype_name, integer_tensor, new_finding
from holdfast.model.probe_findings import Finding

# The largest number: products and all sums on the way stay exact in the type, whatever the order.
_FORMS = ((torch.float32, 8), (torch.bfloat16, 1), (torch.float16, 1))


def run(asked: ProbeRequest) -> Iterator[Finding]:
    for device in devices():
        size = 256 if asked.small else 512 if device.type == "cpu" else 1024
        for dtype, most in _FORMS[: 2 if device.type == "cpu" else None]:
            a, b = integer_matrix(size, most, 1), integer_matrix(size, most, 2)
            product = torch.matmul(a.to(device, dtype), b.to(device, dtype))
            wrong = wrong_rows(product, a, b)
            detail = f"{len(wrong)} of {size} rows are wrong, the first is row {wrong[0]}" if wrong else ""
            yield replace(new_finding("gemm", device, f"{dtype_name(dtype)} {size}"), ok=not wrong, detail=detail)


def integer_matrix(size: int, most: int, seed: int) -> torch.Tensor:
    return integer_tensor((size, size), CPU, seed) % (2 * most + 1) - most


def wrong_rows(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[int]:
    x = (integer_tensor((len(b),), CPU, 3) % 1023 + 1).double()
    right = torch.mv(a.double(), torch.mv(b.double(), x))
    return (torch.mv(product.cpu().double(), x) != right).nonzero().flatten().tolist()
