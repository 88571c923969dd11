"""`holdfast plan`: a table for people, JSON for programs, one sentence for what makes no sense."""

import json

import pytest

from holdfast.cli.commands import plan_large_job
from holdfast.cli.commands.plan_command import main

FLAGS = {
    "--p-day": "between 0 and 1",
    "--confidence": "between 0 and 1",
    "--refill-h": "--refill-h ",
    "--group-share": "from 0 to 1",
    "--blasts-day": "--blasts-day ",
}


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "1024", "--p-day", "0.0012"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.split() and line.split()[0].isdecimal()]
    assert [row[:2] for row in rows] == [["128", "2"], ["256", "2"], ["512", "3"], ["1024", "4"]]
    assert "--standbys" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "8", "--group-share", "0", "--blast", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"1", "2", "4", "8"} and found["8"]["plain"] == 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--nodes", "0"], "--nodes "),
        (["--nodes", "4", "--p-day", "1.5"], "--p-day "),
        (["--nodes", "4", "--refill-h", "0"], "--refill-h "),
        (["--nodes", "4", "--group", "0"], "--group "),
        (["--nodes", "4", "--group", "9" * 400], "1,000,000"),
        (["--nodes", "4", "--blast", "9" * 400], "1,000,000"),
        (["--nodes", "4", "--refill-h", "inf"], "--refill-h "),
        *((["--nodes", "4", flag, "nan"], why) for flag, why in FLAGS.items()),
        *((["--nodes", "4", flag, "inf"], why) for flag, why in FLAGS.items()),
        (["--nodes", "4", "--group-share", "2"], "from 0 to 1"),
    ],
)
def test_bad_input(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert why in capsys.readouterr().err


def test_a_large_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "1024", "--days", "5", "--seeds", "1"]) == 0
    text = capsys.readouterr().out
    for words in ("128 nodes", "standbys: 2 for single nodes", "a script that saves by itself: every", "no standbys"):
        assert words in text
    assert "0.00%" not in text.partition("what to expect")[2].splitlines()[1], "one seed tells nothing of chance"
    assert "--seeds 3" in text
    assert main(["--gpus", "1024", "--days", "5", "--seeds", "1", "--json", "--p-day", "0.01"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures_per_day"] == pytest.approx(1.28) and found["standbys"] >= 4
    ettr = {one["what"]: one["ettr"] for one in found["choices"]}
    assert ettr["all of it"] >= ettr["neither standbys nor state in memory"]


def test_what_seeds_cannot_tell_apart_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "512", "--days", "3", "--seeds", "2"]) == 0
    text = capsys.readouterr().out
    assert main(["--gpus", "512", "--days", "3", "--seeds", "2", "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    alike = [one["what"] for one in choices[1:] if not one["unlike"] and not one["better"]]
    assert alike and f"'{choices[0]['what']}': {', '.join(alike)}" in text


def test_what_every_seed_loses_less_with_is_said_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """At a few failures a month copies are charged more than they save, by prices that are not all measured."""
    assert main(["--gpus", "1024", "--days", "20", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["--gpus", "1024", "--days", "20", "--seeds", "2", "--json"]) == 0
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)["choices"]}
    assert found["no copies on peers"]["better"] and found["no copies on peers"]["ettr"] > found["all of it"]["ettr"]
    why = plan_large_job.WHY_BETTER["no copies on peers"]
    [told] = [line for line in lines if line.endswith(why)]
    assert told.count("'") == 2
    assert [one["what"] for one in found.values() if one["better"] and one["unlike"]] == []


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "either --nodes or --gpus"),
        (["--nodes", "8", "--gpus", "64"], "either --nodes or --gpus"),
        (["--gpus", "63"], "multiple of --nproc"),
        (["--gpus", "64", "--save-s", "0"], "--save-s "),
        (["--gpus", "64", "--days", "0"], "--days "),
        *((["--gpus", "64", "--days", value], "--days ") for value in ("nan", "inf")),
        *((["--gpus", "64", flag, value], flag) for flag in ("--save-s", "--step-s") for value in ("nan", "inf")),
        (["--gpus", "64", "--failures", "none.toml"], "neither one of byterobust"),
    ],
)
def test_a_large_job_that_makes_no_sense(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert why in capsys.readouterr().err
