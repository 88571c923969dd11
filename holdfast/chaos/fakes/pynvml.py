"""A fake of NVIDIA's driver library for jobs that chaos makes; its GPUs report the readings that chaos sets.

Python imports it instead of the real library because its folder comes first on PYTHONPATH. GPU 0 of a node reports
the values in `nvml.json` in the folder of that node's machine; without that file all readings are healthy.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 10, 15
NVML_ERROR_IN_USE, NVML_ERROR_GPU_NOT_FOUND, NVML_ERROR_UNKNOWN = 19, 28, 999
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC = 0, 1
NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 0, 1
nvmlEventTypeXidCriticalError = 8

_WELL: dict[str, Any] = {
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
    "nvmlDeviceGetNvLinkState": 1,
    "nvmlDeviceGetName": "NVIDIA H200",
}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def _read_values() -> dict[str, Any]:
    """Return the readings set for this node, named by HOLDFAST_MARK; empty if none are set."""
    node = os.path.basename(os.environ.get("HOLDFAST_MARK", ""))
    try:
        found: dict[str, Any] = json.loads(Path(os.environ["HOLDFAST_CHAOS_NVML"], node, "nvml.json").read_text())
    except (OSError, KeyError, ValueError):
        return {}
    return found


def _read_value(name: str, *_args: Any) -> Any:
    while "hangs" in (told := _read_values()):
        time.sleep(0.1)
    if "broken" in told:
        raise NVMLError(int(told["broken"]))
    return told.get(name, _WELL[name])


def nvmlInit() -> None:
    return


def nvmlDeviceGetCount() -> int:
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def _pci_bus(handle: int) -> SimpleNamespace:
    return SimpleNamespace(busId=f"00000000:{0x3A + handle:02X}:00.0".encode())


nvmlDeviceGetPciInfo = _pci_bus


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    _read_value("nvmlDeviceGetTemperature")
    return int(_read_values().get("ecc", 0)) if kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED else 0


def nvmlDeviceGetFieldValues(handle: int, fields: list[int]) -> list[SimpleNamespace]:
    _read_value("nvmlDeviceGetNvLinkState")
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=field)) for field in fields]


def nvmlEventSetCreate() -> str:
    return "events"


def nvmlDeviceRegisterEvents(handle: int, kinds: int, events: str) -> None:
    return


def nvmlEventSetWait_v2(events: str, timeout_ms: int) -> SimpleNamespace:
    raise NVMLError(NVML_ERROR_TIMEOUT)


def __getattr__(name: str) -> Any:
    if name not in _WELL:
        raise AttributeError(name)
    return lambda *args: _read_value(name, *args)
