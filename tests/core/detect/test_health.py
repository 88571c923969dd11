"""What readings of a machine are taken for."""

import pytest

from holdfast.core.detect import health
from holdfast.core.detect.health import GaugeRow, HealthDetector, HealthLimits
from holdfast.logs import catalog_files
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Gauge, StrainKind

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


def test_heat_is_a_strain_as_long_as_it_lasts() -> None:
    watched = Watched()
    watched.read("gpu.temperature", 88.0)
    for at in (10.0, 20.0):
        watched.read("gpu.slowed", 64.0, at)
        assert watched.health.strains == (), "it may be over in a moment"
    watched.read("gpu.slowed", 64.0, 30.0)
    [strain] = watched.health.strains
    assert (strain.kind, strain.since, strain.nodes) == (StrainKind.SLOWS, 10.0, ("n1",))
    assert strain.text == "slows GPU 0 down for heat or power at 88 °C"
    for at, value in ((40.0, 0.0), (50.0, 0.0), (60.0, 64.0), (70.0, 0.0), (80.0, 0.0)):
        watched.read("gpu.slowed", value, at)
        assert [one.since for one in watched.health.strains] == [10.0], "clocks go up and down within a step"
    for at in (90.0, 100.0, 110.0, 120.0):
        watched.read("gpu.slowed", 64.0 if at < 120.0 else 0.0, at)
    assert [one.since for one in watched.health.strains] == [10.0], "it was never over"
    watched.read("gpu.slowed", 0.0, 130.0)
    watched.read("gpu.slowed", 0.0, 140.0)
    assert watched.health.strains == ()


def test_a_driver_is_strained_since_it_was_asked() -> None:
    watched = Watched()
    watched.read("gpu.stuck_s", 0.0, 90.0, of="GPUs")
    watched.read("gpu.stuck_s", 12.0, 112.0, of="GPUs")
    watched.read("gpu.stuck_s", 14.0, 114.0, of="GPUs")
    [strain] = watched.health.strains
    assert (strain.kind, strain.since) == (StrainKind.STANDS, 100.0)
    assert strain.text == "has not answered for 14 s when asked for the state of its GPUs"
    watched.read("gpu.stuck_s", 0.0, 116.0, of="GPUs")
    assert watched.health.strains == ()


def test_a_link_is_strained_at_the_first_reading_and_its_flap_for_a_while() -> None:
    watched = Watched()
    for at, down, flaps in ((0.0, 0.0, 3.0), (30.0, 1.0, 4.0)):
        assert watched.read("net.down", down, at, of="eth0") is watched.read("net.flaps", flaps, at, of="eth0") is None
    assert {(one.kind, one.since, one.sign) for one in watched.health.strains} == {
        (StrainKind.CUT, 30.0, "net.down eth0"),
        (StrainKind.FLAPPED, 30.0, "net.flaps eth0"),
    }
    watched.read("net.down", 0.0, 60.0, of="eth0")
    watched.read("net.flaps", 4.0, 60.0, of="eth0")
    assert [one.kind for one in watched.health.strains] == [StrainKind.FLAPPED]
    watched.read("net.flaps", 4.0, 331.0, of="eth0")
    assert watched.health.strains == ()


def test_what_only_fills_up_is_no_strain() -> None:
    watched = Watched()
    watched.read("disk.free", 0.001, 0.0, of="/")
    watched.read("gpu.lost", 1.0, 0.0)
    assert watched.health.strains == ()


@pytest.mark.parametrize("gauge", ["disk.free", "disk.inodes_free", "shm.free"])
def test_what_is_over_is_taken_back_once_and_may_come_again(gauge: str) -> None:
    watched = Watched()
    scale = 3.0 if gauge == "shm.free" else 1.0
    readings = [scale * part for part in (0.5, 0.001, 0.001, 0.001, 0.011, 0.5, 0.5, 0.001, 0.001, 0.001)]
    told = [watched.read(gauge, value, 10.0 * at, of="/scratch") for at, value in enumerate(readings)]
    alarms = [alarm for alarm in told if alarm]
    assert [alarm.over for alarm in alarms] == [False, True, False], "near the limit it is not over yet"
    assert told[5] is alarms[1] and "again" in alarms[1].reason.split()
    assert {alarm.signature for alarm in alarms} == {f"{gauge} /scratch"}
    assert (alarms[1].stance, alarms[1].hard, alarms[1].suspects) == (Stance.NOTIFY, False, alarms[0].suspects)
    assert Watched().read(gauge, 0.5, of="/scratch") is None, "nothing was told of it"
