"""Probe of copies between the host and every device, both ways: how fast are they, and does the data arrive?"""

from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.probe_tools import accelerators, integer_tensor, new_finding, time_work
from holdfast.model.probe_findings import Finding

_TIMES = 30
_LIMIT_S = 2.0


def run(asked: ProbeRequest) -> Iterator[Finding]:
    if not accelerators():
        yield Finding(probe="copy_speed", level=2, ok=None, detail="this node has no accelerator")
    size = 32 << 20 if asked.small else 512 << 20
    for device in accelerators():
        sent = integer_tensor((size // 8,), device, 31).cpu().pin_memory()
        there = torch.empty(sent.shape, dtype=sent.dtype, device=device)
        back = torch.empty_like(sent, pin_memory=True)
        for way, to, of in (("to", there, sent), ("from", back, there)):
            took = time_work(device, partial(to.copy_, of), times=_TIMES, limit_s=_LIMIT_S)
            rates = tuple(round(size / 1e9 / each, 3) for each in took)
            found = new_finding("copy_speed", device, f"{way} the device, {size >> 20} MiB")
            same = way == "to" or torch.equal(back, sent)
            detail = "" if same else "the content came back changed"
            speed = replace(found, value=median(rates), unit="GB/s", samples=rates, rough=asked.small)
            yield replace(speed, ok=same, detail=detail)
