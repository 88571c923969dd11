"""Scenarios say what is wrong with them in one sentence; a walk is its seed."""

import errno
import os
from pathlib import Path

import pytest

from holdfast.chaos.fault_catalog import KINDS
from holdfast.chaos.injection_records import MOMENTS, NEUTRAL, InjectedFault
from holdfast.chaos.scenario import WALK, BadScenario, draw_scenario, fault_lines, fault_mistake, read_scenario

JOB = '[[fault]]\nkind = "rank.kill"\n[job]\nrun = ["a.py"]\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text)
    return path


def test_a_scenario_is_read(tmp_path: Path) -> None:
    text = 'seed = 7\n[job]\nrun = ["a.py"]\ndisk_mib = 8\n[[fault]]\nkind = "rank.kill"\nrank = 2\nwhen = "saving"\n'
    found = read_scenario(written(tmp_path, text))
    assert found.seed == 7 and found.job and found.job.disk_mib == 8
    assert found.fault == (InjectedFault(kind="rank.kill", rank=2, when="saving"),)
    assert fault_lines(found) == ["rank.kill rank=2 when=saving"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "[[fault]]"),
        ("[[fault]\n", "TOML"),
        ('[[fault]]\nkind = "rank.vex"\n', "fault 1: there is no kind 'rank.vex'"),
        ('[[fault]]\nkind = "rank.kill"\nplace = "weights"\n', "fault 1: rank.kill "),
        ('[[fault]]\nkind = "rank.kill"\nwhen = "never"\n', "saving, restoring, updating"),
        ('[[fault]]\nkind = "rank.kill"\ncolour = 1\n', "colour"),
        ('[[fault]]\nkind = "rank.slow"\nshare = 2.0\n', "share"),
        ('[[fault]]\nkind = "rank.kill"\nafter_s = -1.0\n', "fault 1: after_s "),
        ('[[fault]]\nkind = "rank.kill"\nafter_s = nan\n', "fault 1: after_s "),
        ('[[fault]]\nkind = "rank.stop"\nfor_s = inf\n', "fault 1: for_s "),
        ('[[fault]]\nkind = "rank.kill"\nrank = -1\n', "fault 1: rank "),
        ('[[fault]]\nkind = "disk.slow"\nbytes_s = -5\n', "fault 1: bytes_s "),
        ('[[fault]]\nkind = "rank.slow"\nshare = nan\n', "share"),
        ('[[fault]]\nkind = "rank.exit"\ncode = 300\n', "255"),
        ('patience_s = nan\n[[fault]]\nkind = "rank.kill"\n', "patience_s "),
        ('patience_s = -1\n[[fault]]\nkind = "rank.kill"\n', "patience_s "),
        (f"{JOB}disk_mib = -1\n", "[job]: disk_mib "),
        (f"{JOB}shm_mib = -1\n", "[job]: shm_mib "),
        (f"{JOB}hosts = -1\n", "[job]: hosts "),
        (f"{JOB}hosts = 400\n", "[job]: hosts "),
    ],
)
def test_a_bad_one_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadScenario) as caught:
        read_scenario(written(tmp_path, text))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadScenario, match=os.strerror(errno.ENOENT)):
        read_scenario(tmp_path / "none.toml")


def test_a_walk_is_its_seed() -> None:
    assert draw_scenario(3, 10) == draw_scenario(3, 10) != draw_scenario(4, 10)
    assert 15 < len(draw_scenario(3, 10).fault) < 60, "one fault in about 20 s"
    assert {fault.kind for fault in draw_scenario(3, 60).fault} == set(WALK)
    assert {fault.kind for fault in draw_scenario(3, 10, {"rank.stop": 1}).fault} == {"rank.stop"}


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_walk_has_an_end(minutes: float) -> None:
    with pytest.raises(BadScenario, match="--minutes "):
        draw_scenario(3, minutes)


def test_every_kind_is_whole() -> None:
    fields = set(InjectedFault.__struct_fields__)
    for kind in KINDS.values():
        assert kind.what and set(kind.takes) <= fields - set(NEUTRAL), kind.name
        assert bool(kind.alarms) != bool(kind.blind), f"{kind.name}: either an alarm follows, or it is said why not"
        assert fault_mistake(InjectedFault(kind=kind.name)) == ""
    assert MOMENTS[0] == ""
