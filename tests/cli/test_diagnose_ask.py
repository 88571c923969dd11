"""`holdfast diagnose --ask`: off unless asked for, and then over a real connection."""

import json
from pathlib import Path

import pytest

from holdfast.cli import main
from tests.logs.model_server import answering, sending, serving

CAUSE = "zorblax 17 went out of phase with its fabric"
ANSWER = {
    "class": "node_failure",
    "root_rank": None,
    "evidence": [CAUSE],
    "confidence": 0.9,
    "explanation": "The fabric of a node is gone.",
    "pattern": r"zorblax \d{1,4} went out of phase",
}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    path = tmp_path / "job.log"
    path.write_text("".join(f"step {n} loss {n / 3}\n" for n in range(50)) + f"{CAUSE}\npassword=hunter2\n")
    return path


def test_it_is_asked_only_with_the_flag(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answering(ANSWER)) as model:
        settings = ["--set", f"model.url={model.url}", "--set", "model.name=zorb-7b", "--json"]
        assert main(["diagnose", str(log), *settings]) == 1  # nothing was found
        assert json.loads(capsys.readouterr().out)["class"] == "unknown_child_failure"
        assert model.bodies == []
        assert main(["diagnose", str(log), "--ask", *settings]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["class"], found["action"], found["evidence"]) == ("node_failure", "run_diagnostics", [CAUSE])
    assert "hunter2" not in model.heard
    name = shown.err.split()[-1]
    assert main(["catalog", "add", name]) == 0
    capsys.readouterr()
    assert main(["diagnose", str(log), "--json"]) == 0  # now the rules know it themselves
    assert json.loads(capsys.readouterr().out)["class"] == "node_failure"


def test_a_server_that_does_not_help(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(sending(500)) as model:
        settings = ["--set", f"model.url={model.url}", "--set", "model.name=zorb-7b"]
        assert main(["diagnose", str(log), "--ask", "--json", *settings]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["class"] == "unknown_child_failure"
    assert shown.err.count("\n") == 1
    assert "the rules' diagnosis stands" in shown.err


def test_the_flag_needs_an_endpoint(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(log), "--ask"]) == 2
    assert "model.url" in capsys.readouterr().err
