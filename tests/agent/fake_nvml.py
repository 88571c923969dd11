"""A driver with GPUs whose readings tests set; it raises what the real one raises."""

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


READINGS: dict[str, Any] = {
    "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetRetiredPagesPendingStatus": 0,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetPcieReplayCounter": 0,
    "nvmlDeviceGetTemperature": 45,
    "nvmlDeviceGetTemperatureThreshold": 87,
    "nvmlDeviceGetPowerUsage": 120_000,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93, memory=20),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=1 << 30),
    "nvmlDeviceGetUUID": b"GPU-0b6f",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetNvLinkState": 1,
    "nvmlDeviceGetTotalEccErrors": 0,
}


class GpmMetrics:
    """c_nvmlGpmMetricsGet_t: what is asked of two samples, and the answer."""

    def __init__(self) -> None:
        self.version = self.numMetrics = 0
        self.sample1 = self.sample2 = [0.0, 0.0]
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0)]


class FakeNvml:
    """As much of pynvml as the source uses."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 10, 15
    NVML_ERROR_IN_USE, NVML_ERROR_GPU_NOT_FOUND, NVML_ERROR_UNKNOWN = 19, 28, 999
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC = 0, 1
    NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 0, 1
    nvmlEventTypeXidCriticalError = 8
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 1, 5
    c_nvmlGpmMetricsGet_t = GpmMetrics

    def __init__(self, gpus: int = 2) -> None:
        self.gpus = [dict(READINGS) for _ in range(gpus)]
        self.ecc: list[dict[tuple[int, int], int]] = [{} for _ in range(gpus)]
        self.broken: dict[int, int] = {}  # GPU -> what every call for it raises
        self.xids: list[tuple[int, int]] = []
        self.tensor_s: list[tuple[float, float]] = []  # by GPU: for how long its tensor cores worked, and of how long
        self.gpm_code = 0  # what the metrics of GPM answer
        self.calls: list[str] = []

    def nvmlInit(self) -> None:
        if not self.gpus:
            raise NVMLError(9)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{0x3A + handle:02X}:00.0".encode())

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        self._ask("nvmlDeviceGetTotalEccErrors", handle)
        return self.ecc[handle].get((kind, counter), 0)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:
        self._ask("nvmlDeviceGetNvLinkState", handle)
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=field)) for field in fields]

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        assert kinds == self.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> SimpleNamespace:
        assert timeout_ms == 0, "a source never waits"
        if not self.xids:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        gpu, xid = self.xids.pop(0)
        return SimpleNamespace(device=gpu, eventData=xid)

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(handle < len(self.tensor_s)))

    def nvmlGpmSampleAlloc(self) -> list[float]:
        return [0.0, 0.0]

    def nvmlGpmSampleGet(self, handle: int, sample: list[float]) -> list[float]:
        sample[:] = self.tensor_s[handle]
        return sample

    def nvmlGpmMetricsGet(self, wanted: GpmMetrics) -> GpmMetrics:
        assert (wanted.version, wanted.numMetrics) == (self.NVML_GPM_METRICS_GET_VERSION, 1)
        assert wanted.metrics[0].metricId == self.NVML_GPM_METRIC_ANY_TENSOR_UTIL
        worked, passed = (after - before for before, after in zip(wanted.sample1, wanted.sample2, strict=True))
        wanted.metrics[0].nvmlReturn = self.gpm_code
        wanted.metrics[0].value = 100 * worked / passed if passed else float("inf")
        return wanted

    def _ask(self, name: str, handle: int) -> Any:
        self.calls.append(name)
        if handle in self.broken:
            raise NVMLError(self.broken[handle])
        value = self.gpus[handle][name]
        if isinstance(value, NVMLError):
            raise value
        return value

    def __getattr__(self, name: str) -> Any:
        if name not in READINGS:
            raise AttributeError(name)
        return lambda handle, *_: self._ask(name, handle)
