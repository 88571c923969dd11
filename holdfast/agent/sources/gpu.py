"""Reads GPUs through NVML, without starting CUDA: counters, links, heat, and the driver's Xid events."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.sources import Signal, SourceAbsent, tensor_activity
from holdfast.agent.sources.tensor_activity import TensorActivity
from holdfast.model.observation import Gauge, Line

_EVENTS = 64  # of one reading
_LINKS = 18
_SLOWED = 0x08 | 0x20 | 0x40 | 0x80  # hardware slowdown, thermal in software and hardware, power brake
_NVLINK_ERRORS = (38, 45, 52, 59)  # NVML_FI_DEV_NVLINK_{CRC_FLIT,CRC_DATA,REPLAY,RECOVERY}_ERROR_COUNT_TOTAL
Ask = Callable[[], float]


def load_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise SourceAbsent("nvidia-ml-py is not installed; install holdfast[gpu] to watch GPUs") from None
    return pynvml


class Gpu(msgspec.Struct):
    name: str  # "GPU 3"
    model: str  # "NVIDIA H200"; empty if it does not say
    bus: str  # as the kernel writes it: 0000:3b:00
    asks: dict[str, Ask]  # those that this GPU can answer
    lost: bool = False
    uuid: str = ""  # empty if it does not say


class GpuSource:
    """Reads GPUs. `visible` is CUDA_VISIBLE_DEVICES: GPUs that the job does not see are ignored."""

    def __init__(self, nvml: Any, clock: Callable[[], float], visible: str | None = None) -> None:
        self.nvml = nvml
        self._clock = clock
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as e:
            raise SourceAbsent(str(e)) from None
        self._lost = {nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_GPU_NOT_FOUND}
        self._passing = {nvml.NVML_ERROR_TIMEOUT, nvml.NVML_ERROR_UNKNOWN, nvml.NVML_ERROR_IN_USE}
        self.gpus = [gpu for index in range(count) if (gpu := self._open_gpu(index, visible))]
        if not self.gpus:
            raise SourceAbsent("this job sees no GPU")
        self._events = self._register_events()

    def _open_gpu(self, index: int, visible: str | None) -> Gpu | None:
        nvml = self.nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as e:
            return Gpu(f"GPU {index}", "", "", {}, lost=e.value in self._lost)
        uuid = _to_text(self._ask_or(partial(nvml.nvmlDeviceGetUUID, handle), ""))
        if visible is not None and not _is_visible(visible, index, uuid):
            return None
        pci = self._ask_or(partial(nvml.nvmlDeviceGetPciInfo, handle), None)
        bus = _to_text(pci.busId).lower().rpartition(".")[0][-10:] if pci else ""
        model = _to_text(self._ask_or(partial(nvml.nvmlDeviceGetName, handle), ""))
        asks = _make_asks(nvml, handle)
        with contextlib.suppress(nvml.NVMLError):  # older GPUs and drivers cannot tell
            asks[tensor_activity.GAUGE] = TensorActivity(nvml, handle, self._clock).read_percent
        return Gpu(f"GPU {index}", model, bus, asks, uuid=uuid)

    def read(self) -> list[Signal]:
        now = self._clock()
        found: list[Signal] = []
        for gpu in self.gpus:
            found += (Gauge(name=name, of=gpu.name, value=value, at=now) for name, value in self._read_gauges(gpu))
        return [*found, *self._read_xids(now)]

    def _read_gauges(self, gpu: Gpu) -> Iterator[tuple[str, float]]:
        gpu.lost = gpu.lost and not gpu.asks  # one that was reset answers again, and is watched again
        for name, ask in list(gpu.asks.items()):
            try:
                yield name, float(ask())
            except self.nvml.NVMLError as e:
                gpu.lost = e.value in self._lost
                if e.value not in self._passing | self._lost:
                    del gpu.asks[name]  # it cannot tell, and will not be able to later
            if gpu.lost:
                break
        yield "gpu.lost", float(gpu.lost)

    def _register_events(self) -> Any:
        """Register for Xid events and return the event set; None where the driver does not report them."""
        nvml = self.nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return None
        return events

    def _read_xids(self, now: float) -> Iterator[Line]:
        """Yield Xid events as lines worded like the kernel log's, so that the same catalog rows match them."""
        for _ in range(_EVENTS if self._events is not None else 0):
            try:
                event = self.nvml.nvmlEventSetWait_v2(self._events, 0)
            except self.nvml.NVMLError:
                return  # there is none
            pci = self._ask_or(partial(self.nvml.nvmlDeviceGetPciInfo, event.device), None)
            bus = _to_text(pci.busId).lower().rpartition(".")[0][-10:] if pci else "0"
            yield Line(text=f"NVRM: Xid (PCI:{bus}): {event.eventData}, reported by NVML", at=now)

    def _ask_or(self, ask: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return ask()
        except self.nvml.NVMLError:
            return otherwise


def read_gpus(within_s: float) -> list[Gpu]:
    """Return the GPUs with a known UUID that this process's children will see. Return none if the driver does not
    answer in time: the driver of a broken GPU may hang, so a thread asks it, and the thread is then abandoned."""
    found: list[Gpu] = []

    def ask() -> None:
        with contextlib.suppress(SourceAbsent):
            gpus = GpuSource(load_nvml(), SystemClock().wall, os.environ.get("CUDA_VISIBLE_DEVICES")).gpus
            found.extend(gpu for gpu in gpus if gpu.uuid)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(within_s)
    return list(found)


def _is_visible(visible: str, index: int, uuid: str) -> bool:
    named = [part.strip() for part in visible.split(",")]
    return any(part == str(index) or (part.startswith("GPU-") and uuid.startswith(part)) for part in named if part)


def _to_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _make_asks(nvml: Any, handle: Any) -> dict[str, Ask]:
    """Return the NVML query for each gauge, by the gauge's name."""
    ecc = partial(nvml.nvmlDeviceGetTotalEccErrors, handle)
    corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    rows = partial(nvml.nvmlDeviceGetRemappedRows, handle)
    max_width, width = nvml.nvmlDeviceGetMaxPcieLinkWidth, nvml.nvmlDeviceGetCurrPcieLinkWidth
    max_gen, gen = nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkGeneration
    heat = partial(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    limit = partial(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    asks: dict[str, Ask] = {
        "gpu.ecc_uncorrected": partial(ecc, uncorrected, nvml.NVML_VOLATILE_ECC),
        "gpu.ecc_uncorrected_ever": partial(ecc, uncorrected, nvml.NVML_AGGREGATE_ECC),
        "gpu.ecc_corrected": partial(ecc, corrected, nvml.NVML_VOLATILE_ECC),
        "gpu.ecc_corrected_ever": partial(ecc, corrected, nvml.NVML_AGGREGATE_ECC),
        "gpu.rows_remapped": lambda: sum(rows()[:2]),
        "gpu.rows_pending": lambda: rows()[2],
        "gpu.rows_failed": lambda: rows()[3],
        "gpu.pages_pending": partial(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle),
        "gpu.pcie_width_missing": lambda: max_width(handle) - width(handle),
        "gpu.pcie_gen_missing": lambda: max_gen(handle) - gen(handle),
        "gpu.pcie_replays": partial(nvml.nvmlDeviceGetPcieReplayCounter, handle),
        "gpu.temperature": heat,
        "gpu.temperature_margin": lambda: limit() - heat(),
        "gpu.power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "gpu.clock_reasons": partial(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        "gpu.slowed": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & _SLOWED,
        "gpu.utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "gpu.memory_used": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "gpu.nvlink_errors": partial(_nvlink_errors, nvml, handle),
    }
    if links := [link for link in range(_LINKS) if _is_link_up(nvml, handle, link)]:
        asks["gpu.nvlink_down"] = lambda: sum(not _is_link_up(nvml, handle, link) for link in links)
    return asks


def _is_link_up(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:
        return False


def _nvlink_errors(nvml: Any, handle: Any) -> float:
    fields = nvml.nvmlDeviceGetFieldValues(handle, list(_NVLINK_ERRORS))
    told = [field.value.ullVal for field in fields if field.nvmlReturn == 0]
    if not told:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return float(sum(told))
