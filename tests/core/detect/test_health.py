"""What readings of a machine are taken for."""

import pytest

from holdfast.core.detect import health
from holdfast.core.detect.health import GaugeRow, HealthDetector, HealthLimits
from holdfast.logs import catalog_files
from holdfast.model.alarm import Alarm, Kind, Stance
from holdfast.model.observation import Gauge

ROWS = catalog_files.load_health()


class Watched:
    def __init__(self, limits: HealthLimits | None = None) -> None:
        self.health = HealthDetector(limits or HealthLimits(), ROWS)

    def read(self, name: str, value: float, at: float = 0.0, of: str = "GPU 0") -> Alarm | None:
        return self.health.on_gauge(Gauge(name=name, of=of, value=value, at=at), ("n1",))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.gauge)
def test_a_row_is_met_by_its_own_sample(row: GaugeRow) -> None:
    assert health.find_row_fault(row) == ""


def test_what_was_before_the_job_does_not_count() -> None:
    watched = Watched()
    assert watched.read("gpu.ecc_uncorrected", 17.0) is None
    assert watched.read("gpu.ecc_uncorrected", 17.0, 10.0) is None
    alarm = watched.read("gpu.ecc_uncorrected", 18.0, 20.0)
    assert alarm is not None
    assert (alarm.kind, alarm.at, alarm.suspects) == (Kind.HEALTH, 20.0, ("n1",))
    assert (alarm.klass, alarm.group, alarm.hard, alarm.stance) == (
        "gpu_ecc_memory",
        "infrastructure",
        True,
        Stance.ACT,
    )
    assert alarm.evidence == ("gpu.ecc_uncorrected of GPU 0 reads 18",)


def test_a_counter_that_was_reset() -> None:
    watched = Watched()
    watched.read("gpu.ecc_uncorrected", 17.0)
    assert watched.read("gpu.ecc_uncorrected", 0.0, 10.0) is None
    assert watched.read("gpu.ecc_uncorrected", 1.0, 20.0) is not None


def test_a_slow_rise_is_not_a_sudden_one() -> None:
    watched = Watched()
    slowly = [watched.read("gpu.pcie_replays", 10.0 * i, 10.0 * i) for i in range(1000)]
    assert not any(slowly), "300 in five minutes"
    assert watched.read("gpu.pcie_replays", 11_000.0, 10_010.0) is not None


def test_heat_is_told_only_if_it_lasts_and_never_acted_on() -> None:
    watched = Watched()
    readings = [watched.read("gpu.temperature_margin", v, 10.0 * i) for i, v in enumerate((1, 1, 9, 1, 1, 1))]
    assert [bool(r) for r in readings] == [False] * 5 + [True]
    assert readings[-1] and (readings[-1].stance, readings[-1].hard) == (Stance.NOTIFY, False)


def test_the_same_is_said_once_in_a_while() -> None:
    watched = Watched()
    said = [at for at in range(0, 9000, 10) if watched.read("gpu.lost", 1.0, float(at))]
    assert said == [0, 3600, 7200]
    assert watched.read("gpu.lost", 1.0, 7300.0, of="GPU 1"), "another GPU is other news"


def test_each_machine_part_has_its_own_counter() -> None:
    watched = Watched()
    watched.read("net.flaps", 0.0, of="eth0")
    watched.read("net.flaps", 0.0, of="eth1")
    assert watched.read("net.flaps", 1.0, 10.0, of="eth0") is None
    assert watched.read("net.flaps", 1.0, 20.0, of="eth1") is None
    assert watched.read("net.flaps", 2.0, 30.0, of="eth1") is not None


@pytest.mark.parametrize("stance", list(Stance))
def test_shadow_mode(stance: Stance) -> None:
    alarm = Watched(HealthLimits(stance=stance)).read("gpu.lost", 1.0)
    assert alarm is not None and alarm.stance is stance
    low = Watched(HealthLimits(stance=stance)).read("disk.free", 0.0, of="/")
    assert low is not None and low.stance is (Stance.OBSERVE if stance is Stance.OBSERVE else Stance.NOTIFY)


def test_unknown_gauges_and_numbers_that_are_none() -> None:
    watched = Watched()
    assert watched.read("gpu.mood", 1.0) is None
    for name in ("gpu.lost", "gpu.ecc_uncorrected", "disk.free"):
        assert watched.read(name, float("nan")) is None


def test_low_room_says_what_to_do() -> None:
    alarm = Watched().read("disk.free", 0.001, of="/scratch")
    assert alarm and alarm.reason == "has hardly any room left at /scratch; free some, or write elsewhere"
    assert (alarm.klass, alarm.group, alarm.stance) == ("disk_full", "data_storage", Stance.NOTIFY)
