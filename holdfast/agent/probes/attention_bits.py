"""Probe of attention, forward and backward, with inputs of full precision; repeated results must agree bit for bit."""

from collections.abc import Iterator

import torch
from msgspec.structs import replace
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.probe_tools import devices, dtype_name, float_tensor, new_finding, same_bits, tensor_digest
from holdfast.model.probe_findings import Finding

# Those that have an order of summation; which of them is taken follows from the device and the sizes alone.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def run(asked: ProbeRequest) -> Iterator[Finding]:
    for device in devices():
        heads, length, width = (2, 64, 32) if asked.small else (4, 256, 64) if device.type == "cpu" else (16, 2048, 128)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        inputs = [
            float_tensor((2, heads, length, width), device, seed, dtype).requires_grad_() for seed in (21, 22, 23)
        ]
        grad = float_tensor((2, heads, length, width), device, 24, dtype)
        found = new_finding("attention_bits", device, f"{dtype_name(dtype)} {heads}x{length}x{width}")
        first = _attention_step(inputs, grad)
        again = sum(not same_bits(first, _attention_step(inputs, grad)) for _ in range(asked.repeats))
        detail = f"{again} of {asked.repeats} repetitions gave different bits" if again else ""
        yield replace(found, ok=not again, detail=detail, digest=tensor_digest(*first))


def _attention_step(inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    q, k, v = inputs
    with sdpa_kernel(_KERNELS):
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out, inputs, grad)]
