"""Reads the share of time in which a GPU's tensor cores worked, through NVML's GPM, which Hopper and newer GPUs have.

The driver counts all the time; a reading compares two of its samples. It needs no CUDA and does not slow the job.
"""

import math
from collections.abc import Callable
from typing import Any

GAUGE = "gpu.tensor_active"  # in percent
_LEAST_S = 1.0  # between the two samples: a shorter time says little


class TensorActivity:
    """Reads the tensor cores of one GPU. All methods, also the constructor, raise NVMLError if NVML has no figure."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float]) -> None:
        self._nvml, self._handle, self._clock = nvml, handle, clock
        ask = getattr(nvml, "nvmlGpmQueryDeviceSupport", None)  # older versions of the library lack it
        if ask is None or not ask(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._last, self._next = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, self._last)
        self._last_at, self._percent = clock(), math.nan

    def read_percent(self) -> float:
        """Return the percentage of time that the tensor cores worked since the last reading, or that reading's result
        if it was only a moment ago. Raise an NVMLError if there is no result yet; a later call succeeds."""
        if self._clock() >= self._last_at + _LEAST_S:
            self._percent = self._compare_samples()
        if math.isnan(self._percent):
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_TIMEOUT)
        return self._percent

    def _compare_samples(self) -> float:
        """Take a sample; return the percentage of time in which tensor cores worked since the last sample; NaN:
        unknown."""
        nvml = self._nvml
        nvml.nvmlGpmSampleGet(self._handle, self._next)
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        wanted.metrics[0].metricId = nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
        wanted.sample1, wanted.sample2 = self._last, self._next
        self._last, self._next, self._last_at = self._next, self._last, self._clock()
        metric = nvml.nvmlGpmMetricsGet(wanted).metrics[0]
        if metric.nvmlReturn != 0:
            raise nvml.NVMLError(metric.nvmlReturn)
        return float(metric.value) if math.isfinite(metric.value) else math.nan
