"""Probe that has all devices of the node send to each other at once: does the data arrive, and how fast?"""

import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.probe_tools import accelerators, integer_tensor, new_finding, sync_device
from holdfast.model.probe_findings import Finding

_TIMES = 10


def run(asked: ProbeRequest) -> Iterator[Finding]:
    found = accelerators()
    if len(found) < 2:
        yield Finding(probe="all_to_all", level=2, ok=None, detail="this node has fewer than two accelerators")
        return
    yield replace(exchange_among(found, 16 << 20 if asked.small else 256 << 20), rough=asked.small)


def exchange_among(places: Sequence[torch.device], size: int) -> Finding:
    """Have all devices send data at once, in rounds. In round n, a device sends to the device n places after it."""
    sent = [integer_tensor((size // 8,), place, 41 + number) for number, place in enumerate(places)]
    got = [torch.empty_like(one) for one in sent]
    rates, wrong = [], []
    for apart in list(range(1, len(places))) * _TIMES:
        _sync_all(places)
        began = time.perf_counter()
        for number in range(len(places)):
            got[(number + apart) % len(places)].copy_(sent[number], non_blocking=True)
        _sync_all(places)
        rates.append(round(size / 1e9 / (time.perf_counter() - began), 3))
        for number in range(len(places)):
            to = (number + apart) % len(places)
            if not torch.equal(got[to], sent[number].to(places[to])):
                wrong.append(f"{places[number]} to {places[to]}")
    model = replace(new_finding("all_to_all", places[0], f"{len(places)} devices, {size >> 20} MiB"), place="")
    detail = f"content changed on the way: {', '.join(dict.fromkeys(wrong))}" if wrong else ""
    return replace(model, ok=not wrong, detail=detail, value=median(rates), unit="GB/s", samples=tuple(rates))


def _sync_all(places: Sequence[torch.device]) -> None:
    for place in places:
        sync_device(place)
