"""`holdfast plan`: a table for people, JSON for programs, one sentence for what makes no sense."""

import json

import pytest

from holdfast.cli.plan import main


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
        (["--nodes", "0"], "--nodes is from 1"),
        (["--nodes", "4", "--p-day", "1.5"], "chances, between 0 and 1"),
        (["--nodes", "4", "--refill-h", "0"], "--refill-h is above 0"),
        (["--nodes", "4", "--group", "0"], "--group is at least 1"),
        (["--nodes", "4", "--group-share", "2"], "from 0 to 1"),
    ],
)
def test_bad_input(flags: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert why in capsys.readouterr().err
