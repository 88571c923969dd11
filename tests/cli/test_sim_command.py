"""`holdfast sim`: what it prints, what it refuses, and that a failing seed names the command that repeats it."""

import contextlib
import json
import shlex
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.commands import sim_command
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.fault_source import HARSH, FaultRates, NodeLoss
from holdfast.sim.invariants import Invariant, UnsafeError
from holdfast.sim.job_world import SimSetup

CHANCES = ("loss", "crash", "defect", "cut", "fleet-fails", "dud", "launch-fails", "stop-fails")
NO_NUMBERS = ("nan", "inf")
SMALL = ["run", "--nodes", "4", "--days", "0.2", "--harsh", "--seed", "5"]


def test_it_says_what_the_faults_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main(SMALL) == 0
    out = capsys.readouterr().out
    assert out.startswith("ETTR ")
    for words in ("incidents ", "mean time to recover", "where the time went", "lost by cause", "entries, sha256 "):
        assert words in out


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main([*SMALL, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    result = simulate(SimSetup(seed=5, nodes=4, days=0.2, rates=HARSH))
    assert (shown["digest"], shown["entries"]) == (result.digest, result.entries)
    assert shown["report"]["ettr"] == result.account.ettr
    assert shown["faults"] == result.struck


def test_its_journal_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sim.db"
    assert sim_command.main([*SMALL, "--json", "--journal", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    with contextlib.closing(SqliteJournal(path, read_only=True)) as journal:
        assert len(list(journal.read())) == shown["entries"]
    assert sim_command.main([*SMALL, "--journal", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nodes", "0"], "--nodes must be at least 1"),
        (["--standbys", "-1"], "--standbys must be at least 0"),
        (["--days", "0"], "--days must be above 0"),
        (["--days", "nan"], "--days must be above 0"),
        (["--shrink", "8"], "--shrink must be below --nodes"),
        (["--save-steps", "0"], "--save-steps must be at least 1"),
        (["--step-s", "0"], "--step-s must be between"),
        (["--launch-fails", "-1"], "--launch-fails must be between 0 and 1000"),
        (["--fault", "soon:loss"], "--fault soon:loss: write it as SECONDS:KIND"),
        (["--fault", "5:comet"], "write it as SECONDS:KIND"),
        (["--fault", "nan:crash"], "--fault nan:crash: "),
        (["--fault", "inf:crash"], "--fault "),
        (["--fault=-1:crash"], "--fault "),
        (["--fault", "90000:crash"], "--fault "),
        (["--fault", "5:loss:zz"], "nodes are named n0, n1 and so on"),
        (["--nodes", "100000000"], "--nodes must be at least 1 and at most 10,000"),
        (["--standbys", "100000000"], "--standbys must be at least 0 and at most 10,000"),
        (["--nproc", "100000000"], "--nproc must be at least 1 and at most 1,024"),
        (["--step-s", "nan"], "--step-s must be between"),
        (["--step-s", "inf"], "--step-s must be between"),
        (["--days", "inf"], "--days must be above 0"),
        *((["--" + name, value], f"--{name} must be between 0 and 1000") for name in CHANCES for value in NO_NUMBERS),
        (["--journal", "/nonexistent/sim.db"], "cannot be used as a journal"),
    ],
)
def test_what_it_refuses(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main(["run", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["walk"], ["run", "--nodes", "many"]])
def test_what_argparse_refuses(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        sim_command.main(argv)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("holdfast sim") and said.endswith("--help\n") and said.count("\n") == 1


def test_a_failing_seed_prints_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(setup: SimSetup) -> None:
        raise UnsafeError(Invariant.WAIT_ENDS)

    monkeypatch.setattr(sim_command, "simulate", fails)
    assert sim_command.main(SMALL) == sim_command.UNSAFE
    err = capsys.readouterr().err
    assert Invariant.WAIT_ENDS in err
    *_, command = err.partition("holdfast sim ")
    assert command.split() == "run --seed 5 --nodes 4 --days 0.2 --harsh".split()


@pytest.mark.parametrize(
    "setup",
    [
        SimSetup(seed=7, nodes=3),
        SimSetup(seed=7, nodes=3, nproc=2, standbys=0, shrink=1, days=1 / 3, acquire=False, step_s=0.3, save_steps=7),
        SimSetup(seed=7, nodes=3, rates=HARSH),
        SimSetup(seed=7, nodes=3, rates=FaultRates(loss=1 / 7, launch_fails=0.25)),
        SimSetup(seed=7, nodes=3, script=((12.5, NodeLoss(node="n1")), (3.0, NodeLoss()))),
    ],
)
def test_the_command_repeats_exactly(setup: SimSetup) -> None:
    holdfast, word, *argv = shlex.split(sim_command.repeat_command(setup))
    assert (holdfast, word) == ("holdfast", "sim")
    again = sim_command._make_setup(sim_command._make_parser().parse_args(argv))
    assert msgspec.json.encode(again) == msgspec.json.encode(setup)


REPLAY = ["replay", "--nodes", "24", "--replica", "2", "--stages", "2", "--q", "1,0.5", "--trials", "20"]


def test_replay_says_who_is_found_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main(REPLAY) == 0
    out = capsys.readouterr().out
    for words in (
        "24 nodes in 6 groups of 4",
        "two faulty at once: both in the set in 20 of 20",
        "replays of 5 steps:",
    ):
        assert words in out


def test_replay_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main([*REPLAY, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["m"], shown["n"], shown["left_over"]) == (4, 6, 0)
    assert [line["q"] for line in shown["lines"]] == [1.0, 0.5]
    assert shown["lines"][0]["dual"]["found"] == 20
    assert {"steps": 1, "by_steps": 1.0} == {key: shown["crossings"][0][key] for key in ("steps", "by_steps")}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--q", "often"], "--q often: write it as"),
        (["--q", "0"], "--q must be above 0"),
        (["--q", "nan"], "--q must be above 0"),
        (["--q", "1e-300"], "--q must be above 0"),
        (["--confidence", "nan"], "--confidence must lie between 0 and 1"),
        (["--step-s", "nan"], "--step-s must be between"),
        (["--nodes", "1000000000"], "--nodes must be at least 1 and at most 100,000"),
        (["--trials", "1000000000"], "--trials must be at least 1 and at most 1,000,000"),
        (["--confidence", "1"], "--confidence must lie between 0 and 1"),
        (["--trials", "0"], "--trials must be at least 1"),
        (["--step-s", "0"], "--step-s must be between"),
        (["--group", "8"], "with m > n a faulty group of each phase would share"),
        (["--group", "3"], "does not hold whole replicas of 2"),
        (["--nodes", "3"], "cannot be cut into at least as many groups as a group has nodes"),
    ],
)
def test_what_replay_refuses(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main([*REPLAY, *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("seeds", ["²:5", "0:²", "5:5", "nan:inf", "0:" + "9" * 30, ":"])
def test_what_dst_refuses(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main(["dst", "--seeds", seeds]) == 2
    assert "A:B" in capsys.readouterr().err
