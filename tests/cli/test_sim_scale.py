"""`holdfast sim run --gpus` and `sim validate`: what they print, and what they refuse."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.commands import sim_command
from holdfast.sim.scale import policy_study, validation

SMALL = ["run", "--gpus", "512", "--days", "5", "--seeds", "1"]


def test_one_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main(SMALL) == 0
    out = capsys.readouterr().out
    for words in (
        "512 GPUs, 5 days, failures of byterobust, 1 seeds",
        "holdfast",
        "where the time went",
        "lost by cause",
    ):
        assert words in out


def test_all_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main([*SMALL, "--policy", "all", "--failures", "llama3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found] == ["holdfast", "byterobust", "megatron", "torchrun"]
    assert all(0 < one["ettr"] <= 1 and one["failures"] == "llama3" for one in found)


def test_mechanisms_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main([*SMALL, "--ablate", "standbys,zygote"]) == 0
    out = capsys.readouterr().out
    assert "without standbys" in out and "without zygote" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "9601"], "multiple of --nproc"),
        (["--gpus", "8"], "--gpus "),
        (["--gpus", "512", "--nodes", "4"], "--nodes does not go with --gpus"),
        (["--gpus", "512", "--harsh"], "--harsh does not go with --gpus"),
        (["--gpus", "512", "--failures", "nothing.toml"], "neither one of byterobust"),
        (["--gpus", "512", "--policy", "hope"], "--policy hope: there are holdfast"),
        (["--gpus", "512", "--ablate", "hope"], "--ablate hope: there are standbys"),
        (["--gpus", "512", "--ablate", "all", "--policy", "torchrun"], "--ablate "),
        (["--gpus", "512", "--seeds", "0"], "--seeds "),
        (["--gpus", "512", "--days", "0"], "--days "),
        (["--gpus", "512", "--rate", "2"], "--rate "),
        (["--gpus", "512", "--standbys", "-1"], "--standbys must be at least 0"),
        (["--gpus", "512", "--standbys", "65"], "at most as many as there are nodes that train (64)"),
        (["--gpus", "512", "--ask-h", "-1"], "--ask-h "),
        (["--gpus", "512", "--ask-h", "nan"], "--ask-h "),
        (["--gpus", "512", "--ask-h", "inf"], "--ask-h "),
        (["--gpus", "512", "--rate", "nan"], "--rate "),
        (["--gpus", "512", "--days", "nan"], "--days "),
        (["--gpus", "512", "--days", "inf"], "--days "),
        (["--gpus", "512", "--step-s", "nan"], "--step-s "),
        (["--failures", "llama3"], "--failures needs --gpus"),
        (["--nodes", "4", "--policy", "torchrun"], "--policy needs --gpus"),
    ],
)
def test_what_it_refuses(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main(["run", *flags]) == 2
    assert words in capsys.readouterr().err


def test_no_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert sim_command.main([*SMALL, "--plot", "nowhere"]) == 2
    assert "pip install 'holdfast[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nope"])
def test_no_picture_where_none_can_be_kept(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'holdfast[plot]'")
    (tmp_path / "file").write_text("here already")
    monkeypatch.setattr(policy_study, "compare_policies", lambda *args: pytest.fail("it is simulated first"))
    assert sim_command.main([*SMALL, "--plot", str(tmp_path / place)]) == 2
    assert str(tmp_path / place) in capsys.readouterr().err


@pytest.mark.slow  # the first picture on a machine makes matplotlib look for fonts
@pytest.mark.parametrize("days", ["0.01", "0.000000001"])
def test_pictures_of_less_than_an_hour(days: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'holdfast[plot]'")
    assert (
        sim_command.main(["run", "--gpus", "64", "--days", days, "--seeds", "1", "--plot", str(tmp_path / "out")]) == 0
    )
    assert (tmp_path / "out" / "ettr.png").stat().st_size > 5000


@pytest.mark.slow  # each part is tested with the simulator, and quick
def test_validate(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_command.main(["validate", "--seeds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["agrees"] for one in found} == {True, False} and all(one["agrees"] or one["known"] for one in found)


def test_validate_prints_what_was_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [*validation.check_standbys(), *validation.check_restarts()]  # the cheap ones of all
    monkeypatch.setattr(validation, "run_checks", lambda seeds: found[:seeds])
    assert sim_command.main(["validate", "--seeds", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == msgspec.to_builtins(found[:2])
    assert sim_command.main(["validate", "--seeds", "1"]) == 0
    assert found[0].published in capsys.readouterr().out
    assert sim_command.main(["validate", "--seeds", "0"]) == 2
