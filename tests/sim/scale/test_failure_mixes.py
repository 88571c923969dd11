"""Mixes of failures: what was published is what is read, and what makes no sense gets one sentence."""

import re
from pathlib import Path

import pytest

from holdfast.sim.scale import failure_mixes
from holdfast.sim.scale.failure_mixes import MixError

BAD = 'name = "x"\nrate = 0.1\nrate_source = ""\n[[fault]]\nname = "a"\nweight = 1\nsource = ""\n'


@pytest.mark.parametrize("name", failure_mixes.KNOWN)
def test_every_figure_has_its_source(name: str) -> None:
    mix = failure_mixes.load_mix(name)
    assert mix.name == name
    assert all(fault.source for fault in mix.fault)
    assert mix.rate_source and mix.updates_source and mix.lemon_source
    assert [blast.name for blast in mix.blast] == ["switch", "rack"] and all(blast.source for blast in mix.blast)
    assert sum(blast.share for blast in mix.blast) == pytest.approx(0.01), "as ByteRobust has it for switches alone"


def test_counts_are_those_of_the_tables() -> None:
    byterobust, llama = failure_mixes.load_mix("byterobust"), failure_mixes.load_mix("llama3")
    assert sum(fault.weight for fault in byterobust.fault) == 39687 + 6096  # explicit and implicit
    assert sum(fault.weight for fault in llama.fault) == 419
    assert llama.rate * 54 * 2048 == pytest.approx(419, abs=0.5)
    assert sum(fault.weight for fault in failure_mixes.load_mix("stepfun").fault) == 584


def test_code_is_parted_into_what_passes_and_what_a_release_brought() -> None:
    mix = failure_mixes.load_mix("byterobust")
    causes = mix.cause_weights(next(fault for fault in mix.fault if fault.name == "CUDA error"))
    assert causes["machine"] == 21
    assert causes["passing"] + causes["release"] == pytest.approx(41)
    assert causes["passing"] / causes["release"] == pytest.approx(22.70 / 9.20)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(BAD + 'shows = "crash"\nmachine = 1\n')
    assert failure_mixes.load_mix(str(path)).fault[0].shows == "crash"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("= nothing", "Invalid"),
        (BAD + 'shows = "smoke"\nmachine = 1\n', "smoke"),
        (BAD + 'shows = "crash"\n', "needs a cause above 0"),
        (BAD + 'shows = "crash"\nmachine = 1\nwhim = 3\n', "whim"),
        (BAD.replace("0.1", "7.0") + 'shows = "crash"\nmachine = 1\n', "from 0 to 1"),
    ],
)
def test_what_makes_no_sense_is_named(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(MixError, match=why):
        failure_mixes.load_mix(str(path))


GOOD = """
name = "x"
rate = 0.1
rate_source = ""
updates_per_day = 1.0
lemons = 0.1
lemon_times = 2.0
[code]
passing = 1.0
release = 2.0
source = ""
[[blast]]
name = "switch"
nodes = 32
share = 0.5
source = ""
[[blast]]
name = "rack"
nodes = 4
share = 0.3
source = ""
[[fault]]
name = "a"
shows = "health"
source = ""
weight = 3.0
read_s = 10.0
reads = 2
machine = 1.0
code = 1.0
passing = 1.0
outside = 1.0
"""
NUMBERS = re.findall(r"^(\w+ = [0-9.]+)$", GOOD, re.MULTILINE)


@pytest.mark.parametrize("line", NUMBERS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1.0", "1e300", "-1", "9" * 30, "9" * 5000])
def test_every_number_is_a_number_that_makes_sense(line: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(GOOD)
    assert failure_mixes.load_mix(str(path)).blast[1].nodes == 4
    path.write_text(GOOD.replace(line, f"{line.split()[0]} = {value}", 1))
    with pytest.raises(MixError, match=r"is from .* to|Expected `int`|digits"):
        failure_mixes.load_mix(str(path))


def test_shares_of_blasts_are_parts_of_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(GOOD.replace("share = 0.3", "share = 0.6"))
    with pytest.raises(MixError, match=rf"^--failures {re.escape(str(path))}: .* blast .* 1 "):
        failure_mixes.load_mix(str(path))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(MixError, match=rf"^--failures nowhere\.toml: .* {', '.join(failure_mixes.KNOWN)} "):
        failure_mixes.load_mix("nowhere.toml")
