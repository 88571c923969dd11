"""The fake driver says what it was told to, through the very source that agents read GPUs with."""

import json
import threading
from pathlib import Path

import pytest

from holdfast.agent.sources.gpu import GpuSource
from holdfast.chaos.fakes import pynvml
from holdfast.chaos.hardware_faults import LINES, NVML, READINGS
from holdfast.config import Settings
from holdfast.core.detect.health import HealthDetector
from holdfast.core.detect.lines import LineDetector, MachineUse
from holdfast.logs import catalog_files
from holdfast.model.detector_alarm import Stance
from holdfast.model.observation import Gauge, Line
from tests.agent import fake_nvml


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(NVML, str(tmp_path))
    monkeypatch.setenv("HOLDFAST_MARK", "/run/nodes/n3")
    (tmp_path / "n3").mkdir()
    return tmp_path / "n3"


def alarms(machine: Path, reading: str) -> list[Stance]:
    """Of the health detector, from readings before and after."""
    settings = Settings()
    health = HealthDetector(settings.health, catalog_files.load_health(settings.health.catalog))
    source = GpuSource(pynvml, lambda: 0.0)
    found = []
    for told in (None, *[READINGS[reading]] * 40):
        if told:
            (machine / "nvml.json").write_text(json.dumps(told))
        gauges = [signal for signal in source.read() if isinstance(signal, Gauge)]
        found += [alarm.stance for gauge in gauges if (alarm := health.on_gauge(gauge, ("n3",)))]
    return found


@pytest.mark.parametrize("reading", sorted(READINGS.keys() - {"hung"}))
def test_every_reading_is_noticed(machine: Path, reading: str) -> None:
    stances = alarms(machine, reading)
    assert stances, "nobody noticed"
    assert (Stance.ACT in stances) == (reading in ("lost", "ecc")) or reading == "nvlink"


def test_a_driver_that_hangs_goes_on_when_that_is_undone(machine: Path) -> None:
    source = GpuSource(pynvml, lambda: 0.0)
    (machine / "nvml.json").write_text(json.dumps(READINGS["hung"]))
    reading = threading.Thread(target=source.read, daemon=True)
    reading.start()
    reading.join(0.3)
    assert reading.is_alive()
    (machine / "nvml.json").unlink()
    reading.join(20.0)
    assert not reading.is_alive()


def test_without_an_order_all_is_well(machine: Path) -> None:
    source = GpuSource(pynvml, lambda: 0.0)
    assert [gpu.bus for gpu in source.gpus] == ["0000:3a:00"]
    assert {s.value for s in source.read() if isinstance(s, Gauge) and s.name in ("gpu.lost", "gpu.slowed")} == {0.0}


def test_it_has_the_names_of_the_real_one() -> None:
    """But for GPM, which older versions of the library lack, too."""
    told = [name for name in vars(fake_nvml.FakeNvml) if name.startswith(("nvml", "NVML"))]
    names = [name for name in told if "gpm" not in name.lower()]
    assert names and all(hasattr(pynvml, name) for name in (*names, *fake_nvml.READINGS))


@pytest.mark.parametrize("kind", list(LINES))
def test_every_line_names_the_machine(kind: str) -> None:
    settings = Settings()
    lines = LineDetector(settings.lines, catalog_files.load_lines(settings.lines.catalog))
    owned = MachineUse(node="n3", suspects=("n3",), speaks=True, gpus=frozenset({"0000:3a:00"}))
    alarm = lines.on_line(Line(text=LINES[kind], at=0.0), owned)
    assert alarm is not None and alarm.hard and alarm.stance is Stance.ACT and alarm.suspects == ("n3",)
