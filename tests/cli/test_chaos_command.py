"""`holdfast chaos` says by its code what came of it, and how to have the same once more."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.chaos.injection_records import FaultResult, InjectedFault, SkippedFault
from holdfast.chaos.scenario import Scenario
from holdfast.cli import main
from holdfast.cli.commands import chaos_command

BACK = FaultResult(id=1, kind="rank.kill", seen=True, named=True, seen_s=1.0, back_s=2.0)
UNSEEN = FaultResult(id=1, kind="rank.kill", seen=False, named=None, seen_s=None, back_s=2.0)
SKIPPED = SkippedFault(id=1, fault=InjectedFault(kind="rank.kill"), at=0.0, why="there is none")


@pytest.mark.parametrize(
    ("lines", "code"), [([BACK], 0), ([BACK, SKIPPED], 0), ([BACK, UNSEEN], 1), ([SKIPPED], 3), ([], 3)]
)
def test_the_code_says_what_came_of_it(lines: list[FaultResult | SkippedFault], code: int) -> None:
    sight = SimpleNamespace(run_dir=Path("run"))
    striker = SimpleNamespace(
        scene=SimpleNamespace(sight=sight, links=None),
        lines=lines,
        run=lambda asked: [line for line in lines if isinstance(line, FaultResult)],
    )
    assert chaos_command._run_scenario(Scenario(), cast(Any, striker), False) == code


def test_the_codes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["run"], ["random"]):
        assert main(["chaos", *words, "--help"]) == 0
        assert " ".join(chaos_command._CODES.split()) in " ".join(capsys.readouterr().out.split())


def test_what_failed_can_be_had_once_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chaos_command, "_strike_job", lambda asked, args: 1)
    words = ["random", "--seed", "7", "--minutes", "2.5", "--kinds", "rank.kill,rank.stop", "a run", "--yes"]
    assert main(["chaos", *words]) == 1
    *_, command = capsys.readouterr().err.strip().partition("holdfast chaos ")
    assert shlex.split(command) == words


@pytest.mark.parametrize("minutes", ["nan", "inf", "-1", "0"])
def test_a_walk_without_an_end_is_refused(capsys: pytest.CaptureFixture[str], minutes: str) -> None:
    assert main(["chaos", "random", "--seed", "1", f"--minutes={minutes}"]) == 2
    assert "--minutes " in capsys.readouterr().err
