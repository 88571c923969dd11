"""Reads GPUs through NVML while they work: temperature, power, and whether the hardware throttles them."""

import time

import torch

from holdfast.agent.sources import SourceAbsent
from holdfast.agent.sources.gpu import GpuSource, load_nvml
from holdfast.model.observation import Gauge

_BRAKED = 0x08 | 0x40 | 0x80  # by the hardware: for heat, or for what the power supply gives
_TOLD = {"gpu.temperature": "°C", "gpu.power_w": "W"}


class GpuHeat:
    """Keeps the highest readings of each GPU; without NVML there are none."""

    def __init__(self, gpus: int) -> None:
        self._source: GpuSource | None = None
        self._most: dict[tuple[str, str], float] = {}
        self._braked: dict[str, int] = {}
        self._buses = [_bus_id(index) for index in range(gpus)]
        if not gpus:
            return
        try:
            self._source = GpuSource(load_nvml(), time.time)
        except SourceAbsent:
            pass

    def read(self) -> None:
        if self._source is None:
            return
        bus_of = {gpu.name: gpu.bus for gpu in self._source.gpus}
        for signal in self._source.read():
            if not isinstance(signal, Gauge):
                continue
            bus = bus_of.get(signal.of, "")
            self._most[bus, signal.name] = max(signal.value, self._most.get((bus, signal.name), 0.0))
            if signal.name == "gpu.clock_reasons":
                self._braked[bus] = self._braked.get(bus, 0) | int(signal.value) & _BRAKED

    def describe_gpu(self, number: int) -> tuple[bool, list[str]]:
        """Return whether the hardware throttled this GPU, and its readings in words."""
        bus = self._buses[number] if number < len(self._buses) else ""
        braked = self._braked.get(bus, 0)
        said = [f"{self._most[bus, name]:.0f} {unit}" for name, unit in _TOLD.items() if (bus, name) in self._most]
        return bool(braked), said + ([f"slowed down by the hardware ({braked:#x})"] if braked else [])


def _bus_id(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    parts = [getattr(found, name, -1) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    domain, bus, device = (int(part) for part in parts)
    return f"{domain:04x}:{bus:02x}:{device:02x}" if min(domain, bus, device) >= 0 else ""  # old ones do not tell
