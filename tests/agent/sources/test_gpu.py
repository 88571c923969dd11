"""GPUs through a driver that tests hold in their hands."""

import sys
import threading

import pytest

from holdfast.agent.sources import SourceAbsent
from holdfast.agent.sources.gpu import GpuSource, read_gpus
from holdfast.core.detect.health import HealthDetector, HealthLimits
from holdfast.core.detect.lines import LineDetector, LineLimits, MachineUse
from holdfast.logs import catalog_files
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Gauge, Line
from tests.agent.fake_nvml import FakeNvml, NVMLError


def source(nvml: FakeNvml, visible: str | None = None) -> GpuSource:
    return GpuSource(nvml, lambda: 100.0, visible)


def gauges(made: GpuSource) -> dict[tuple[str, str], float]:
    return {(s.of, s.name): s.value for s in made.read() if isinstance(s, Gauge)}


def test_every_gpu_is_read() -> None:
    read = gauges(source(FakeNvml(2)))
    assert read["GPU 1", "gpu.temperature_margin"] == 42.0
    assert read["GPU 0", "gpu.power_w"] == 120.0
    assert read["GPU 0", "gpu.slowed"] == 0, "a power cap is normal"
    assert read["GPU 0", "gpu.nvlink_errors"] == 38 + 45 + 52 + 59
    assert {of for of, _ in read} == {"GPU 0", "GPU 1"}
    assert len(read) == 2 * 21


def test_all_gauges_with_a_meaning_are_read() -> None:
    known = {row.gauge for row in catalog_files.load_health() if row.gauge.startswith("gpu.")} - {"gpu.stuck_s"}
    assert known <= {name for _, name in gauges(source(FakeNvml(1)))}


def test_what_a_gpu_cannot_tell_is_not_asked_again() -> None:
    nvml = FakeNvml(1)
    nvml.gpus[0]["nvmlDeviceGetRemappedRows"] = NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    made = source(nvml)
    assert ("GPU 0", "gpu.rows_failed") not in gauges(made)
    nvml.calls.clear()
    gauges(made)
    assert "nvmlDeviceGetRemappedRows" not in nvml.calls
    nvml.gpus[0]["nvmlDeviceGetPowerUsage"] = NVMLError(nvml.NVML_ERROR_UNKNOWN)
    assert ("GPU 0", "gpu.power_w") not in gauges(made)
    nvml.gpus[0]["nvmlDeviceGetPowerUsage"] = 1000
    assert gauges(made)["GPU 0", "gpu.power_w"] == 1.0, "that was only for the moment"


def test_an_uncorrectable_error_becomes_a_hard_alarm() -> None:
    nvml = FakeNvml(2)
    nvml.ecc[1][nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC] = 2  # from before the job
    made, health = source(nvml), HealthDetector(HealthLimits(), catalog_files.load_health())

    def alarms() -> list[Alarm]:
        found = (health.on_gauge(signal, ("n1",)) for signal in made.read() if isinstance(signal, Gauge))
        return [alarm for alarm in found if alarm]

    assert alarms() == []
    nvml.ecc[1][nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC] = 3
    [alarm] = alarms()
    assert (alarm.kind, alarm.klass, alarm.hard, alarm.stance) == (Kind.HEALTH, "gpu_ecc_memory", True, Stance.ACT)
    assert alarm.reason == "has an uncorrectable ECC error in GPU 1"
    assert alarms() == [], "said once"


def test_a_lost_gpu_becomes_a_hard_alarm() -> None:
    nvml = FakeNvml(2)
    made, health = source(nvml), HealthDetector(HealthLimits(), catalog_files.load_health())
    made.read()
    nvml.broken[0] = nvml.NVML_ERROR_GPU_IS_LOST
    found = [health.on_gauge(signal, ("n1",)) for signal in made.read() if isinstance(signal, Gauge)]
    [alarm] = [a for a in found if a]
    assert (alarm.klass, alarm.hard, alarm.reason) == ("gpu_lost_bus", True, "has lost GPU 0")


def test_a_gpu_that_was_lost_is_watched_again_once_it_answers() -> None:
    nvml = FakeNvml(2)
    made = source(nvml)
    nvml.broken[0] = nvml.NVML_ERROR_GPU_IS_LOST
    assert {name: v for (of, name), v in gauges(made).items() if of == "GPU 0"} == {"gpu.lost": 1.0}
    del nvml.broken[0]
    nvml.gpus[0]["nvmlDeviceGetTemperature"] = 95
    read = gauges(made)
    assert (read["GPU 0", "gpu.lost"], read["GPU 0", "gpu.temperature_margin"]) == (0.0, -8.0)


def test_an_xid_speaks_the_kernels_language() -> None:
    nvml = FakeNvml(2)
    made = source(nvml)
    nvml.xids = [(1, 79), (0, 45)]
    lines = [signal for signal in made.read() if isinstance(signal, Line)]
    assert lines[0].text == "NVRM: Xid (PCI:0000:3b:00): 79, reported by NVML"
    owned = MachineUse(node="n1", suspects=("n1",), gpus=frozenset(gpu.bus for gpu in made.gpus))
    alarm = LineDetector(LineLimits(), catalog_files.load_lines()).on_line(lines[0], owned)
    assert alarm and (alarm.klass, alarm.hard, alarm.stance) == ("gpu_lost_bus", True, Stance.ACT)
    assert len([s for s in made.read() if isinstance(s, Line)]) == 0


def test_a_flood_of_events_is_bounded() -> None:
    nvml = FakeNvml(1)
    made = source(nvml)
    nvml.xids = [(0, 31)] * 10_000
    assert len([s for s in made.read() if isinstance(s, Line)]) == 64


def test_gpus_of_others_are_left_alone() -> None:
    assert {of for of, _ in gauges(source(FakeNvml(4), visible="1,3"))} == {"GPU 1", "GPU 3"}
    assert {of for of, _ in gauges(source(FakeNvml(2), visible="GPU-0b6f"))} == {"GPU 0", "GPU 1"}
    with pytest.raises(SourceAbsent):
        source(FakeNvml(2), visible="")


def test_gpus_are_known_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, none, hung, answers = FakeNvml(4), FakeNvml(0), FakeNvml(4), threading.Event()
    monkeypatch.setattr(nvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}".encode(), raising=False)
    monkeypatch.setattr(hung, "nvmlInit", answers.wait)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    seen = [("GPU-1", "GPU 1"), ("GPU-3", "GPU 3")]
    for driver, wait_s, found in ((nvml, 60.0, seen), (none, 60.0, []), (hung, 0.05, [])):
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        assert [(gpu.uuid, gpu.name) for gpu in read_gpus(wait_s)] == found
    answers.set()


def test_without_a_driver_there_are_none() -> None:
    with pytest.raises(SourceAbsent):
        source(FakeNvml(0))


def test_the_real_library_has_what_the_fake_has() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = [name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []
    wrong = {n for n in names if isinstance(getattr(FakeNvml, n), int) and getattr(FakeNvml, n) != getattr(pynvml, n)}
    assert not wrong
