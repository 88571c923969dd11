"""Probe of all devices under load together: how fast they stay, whether bits stay the same, how hot they get."""

import time
from collections.abc import Iterator
from statistics import median

import torch
from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.agent.probes.heat_reader import GpuHeat
from holdfast.agent.probes.probe_tools import CPU, accelerators, dtype_name, float_tensor, new_finding, sync_device
from holdfast.model.probe_findings import Finding

_WINDOWS = 20
_LASTS_S, _LASTS_CPU_S, _LASTS_SMALL_S = 10.0, 2.0, 0.2


def run(asked: ProbeRequest) -> Iterator[Finding]:
    places = accelerators() or [CPU]
    alone = places == [CPU]
    lasts_s = _LASTS_SMALL_S if asked.small else min(_LASTS_CPU_S if alone else _LASTS_S, asked.left_s / 4)
    size = 256 if asked.small else 512 if alone else 8192
    dtype = torch.float32 if alone else torch.bfloat16
    work = [_DeviceLoad(place, size, dtype) for place in places]
    heat = GpuHeat(len(accelerators()))
    until = time.perf_counter() + lasts_s
    while time.perf_counter() < until or not work[0].rates:  # once at least, whoever has the processor meanwhile
        for one in work:
            one.run_window(lasts_s / _WINDOWS)
        heat.read()  # while they are at it
        for one in work:
            one.measure_window()
    for number, one in enumerate(work):
        told = [f"{one.wrong} of {len(one.rates)} results have different bits"] if one.wrong else []
        slowed, said = heat.describe_gpu(number)
        detail = ", ".join([*told, *said])
        found = replace(new_finding("load", one.place, f"{dtype_name(dtype)} {size}"), ok=not one.wrong and not slowed)
        rates = tuple(round(rate, 4) for rate in one.rates)
        yield replace(found, detail=detail, value=median(rates), unit="TFLOP/s", samples=rates, rough=asked.small)


class _DeviceLoad:
    """One device that computes the same product over and over."""

    def __init__(self, place: torch.device, size: int, dtype: torch.dtype) -> None:
        self.place = place
        self._a, self._b = float_tensor((size, size), place, 51, dtype), float_tensor((size, size), place, 52, dtype)
        self._first = torch.matmul(self._a, self._b)
        self._last = torch.empty_like(self._first)
        self._flops = 2.0 * size**3
        self._count = 1
        self._clock = _GpuClock(place) if place.type == "cuda" else _HostClock()
        self.rates: list[float] = []
        self.wrong = 0
        self.run_window(0.0)
        self.measure_window()
        self.rates.clear()

    def run_window(self, lasts_s: float) -> None:
        if self.rates:
            self._count = max(1, round(lasts_s * self.rates[-1] * 1e12 / self._flops))
        self._clock.start()
        for _ in range(self._count):
            torch.matmul(self._a, self._b, out=self._last)
        self._clock.stop()

    def measure_window(self) -> None:
        sync_device(self.place)
        self.rates.append(self._count * self._flops / 1e12 / self._clock.took_s())
        self.wrong += not torch.equal(self._last, self._first)


class _HostClock:
    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()

    def took_s(self) -> float:
        return max(self._ended - self._began, 1e-9)


class _GpuClock:
    """Times work on one GPU by CUDA events, so that a slow GPU does not lengthen the measurements of other GPUs."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        self._marks[0].record(torch.cuda.current_stream(self._place))

    def stop(self) -> None:
        self._marks[1].record(torch.cuda.current_stream(self._place))

    def took_s(self) -> float:
        return max(float(self._marks[0].elapsed_time(self._marks[1])) / 1e3, 1e-9)
