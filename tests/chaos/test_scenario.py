"""Scenarios say what is wrong with them in one sentence; a walk is its seed."""

from pathlib import Path

import pytest

from holdfast.chaos.fault import MOMENTS, NEUTRAL, InjectedFault
from holdfast.chaos.fault_catalog import KINDS
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
        ("", "has no [[fault]]"),
        ("[[fault]\n", "is not TOML"),
        ('[[fault]]\nkind = "rank.vex"\n', "fault 1: there is no kind 'rank.vex'; holdfast chaos list shows all"),
        ('[[fault]]\nkind = "rank.kill"\nplace = "weights"\n', "rank.kill has no use for place"),
        ('[[fault]]\nkind = "rank.kill"\nwhen = "never"\n', "when must be one of saving, restoring, updating"),
        ('[[fault]]\nkind = "rank.kill"\ncolour = 1\n', "colour"),
        ('[[fault]]\nkind = "rank.slow"\nshare = 2.0\n', "between 0 and 1"),
        ('[[fault]]\nkind = "rank.kill"\nafter_s = -1.0\n', "after_s is a number and not negative, not -1.0"),
        ('[[fault]]\nkind = "rank.kill"\nafter_s = nan\n', "after_s is a number and not negative, not nan"),
        ('[[fault]]\nkind = "rank.stop"\nfor_s = inf\n', "for_s is a number and not negative, not inf"),
        ('[[fault]]\nkind = "rank.kill"\nrank = -1\n', "rank is a number and not negative, not -1"),
        ('[[fault]]\nkind = "disk.slow"\nbytes_s = -5\n', "bytes_s is a number and not negative, not -5"),
        ('[[fault]]\nkind = "rank.slow"\nshare = nan\n', "between 0 and 1"),
        ('[[fault]]\nkind = "rank.exit"\ncode = 300\n', "code lies between 0 and 255"),
        ('patience_s = nan\n[[fault]]\nkind = "rank.kill"\n', "patience_s is a number of seconds above 0, not nan"),
        ('patience_s = -1\n[[fault]]\nkind = "rank.kill"\n', "patience_s is a number of seconds above 0, not -1"),
        (f"{JOB}disk_mib = -1\n", "[job]: disk_mib lies between 0, for none, and 1048576, not at -1"),
        (f"{JOB}shm_mib = -1\n", "[job]: shm_mib lies between 0"),
        (f"{JOB}hosts = -1\n", "[job]: hosts lies between 0, for none, and 64, not at -1"),
        (f"{JOB}hosts = 400\n", "[job]: hosts lies between 0, for none, and 64, not at 400"),
    ],
)
def test_a_bad_one_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadScenario) as caught:
        read_scenario(written(tmp_path, text))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadScenario, match="cannot be read"):
        read_scenario(tmp_path / "none.toml")


def test_a_walk_is_its_seed() -> None:
    assert draw_scenario(3, 10) == draw_scenario(3, 10) != draw_scenario(4, 10)
    assert 15 < len(draw_scenario(3, 10).fault) < 60, "one fault in about 20 s"
    assert {fault.kind for fault in draw_scenario(3, 60).fault} == set(WALK)
    assert {fault.kind for fault in draw_scenario(3, 10, {"rank.stop": 1}).fault} == {"rank.stop"}


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_walk_has_an_end(minutes: float) -> None:
    with pytest.raises(BadScenario, match="--minutes lies above 0 and not beyond 10080, a week"):
        draw_scenario(3, minutes)


def test_every_kind_is_whole() -> None:
    fields = set(InjectedFault.__struct_fields__)
    for kind in KINDS.values():
        assert kind.what and set(kind.takes) <= fields - set(NEUTRAL), kind.name
        assert bool(kind.alarms) != bool(kind.blind), f"{kind.name}: either an alarm follows, or it is said why not"
        assert fault_mistake(InjectedFault(kind=kind.name)) == ""
    assert MOMENTS[0] == ""
