"""Probe of how fast every device copies within its memory."""

from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.probe_tools import devices, new_finding, time_work
from holdfast.model.probe_findings import Finding

_TIMES = 40
_LIMIT_S = 2.0


def run(asked: ProbeRequest) -> Iterator[Finding]:
    for device in devices():
        size = 16 << 20 if asked.small else 128 << 20 if device.type == "cpu" else 2 << 30
        one = torch.ones(size, dtype=torch.uint8, device=device)
        other = torch.empty_like(one)
        took = time_work(device, partial(other.copy_, one), times=_TIMES, limit_s=min(_LIMIT_S, asked.left_s / 20))
        rates = tuple(round(2 * size / 1e9 / each, 3) for each in took)  # read and written
        found = new_finding("memory_speed", device, f"{size >> 20} MiB")
        yield replace(found, value=median(rates), unit="GB/s", samples=rates, rough=asked.small)
