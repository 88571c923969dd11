"""Bad input: one sentence each, exit code 2, and nothing left behind."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.cli.command_dispatch import COMMANDS
from holdfast.cli.run_dirs import run_dir_creation, run_directory
from holdfast.config import Settings
from holdfast.model.job_and_seats import Job
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec
from tests.cli.conftest import Start

pytestmark = pytest.mark.usefixtures("no_orphans")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith(("PET_", "HOLDFAST_TOKEN"))]:
        monkeypatch.delenv(name)
    (tmp_path / "ok.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "broken.py").write_text("print('half a line\n")
    (tmp_path / "file").touch()
    (tmp_path / "token").write_text("60f4c1b97ad2e8537be01d94c2f86a35")
    (tmp_path / "short").write_text("hunter2")
    (tmp_path / "bytes").write_bytes(b"\xff" * 40)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.toml").write_text("[recovery\n")
    yield tmp_path
    assert not list(tmp_path.glob("home/runs/*/run.json")), "a run was made of it"


REFUSED = {
    "no script": ("", "no script given"),
    "missing script": ("missing.py", "there is no script missing.py"),
    "syntax error": ("broken.py", "broken.py, line 1: unterminated string literal"),
    "no nodes": ("--nnodes 0 ok.py", "--nnodes 0: a job needs at least 1 node"),
    "bounds the wrong way round": ("--nnodes 4:2 ok.py", "--nnodes 4:2: the minimum comes first"),
    "no ranks": ("--nproc-per-node 0 ok.py", "--nproc-per-node 0: a node needs at least 1 rank"),
    "unknown flag": ("--nodes 3 ok.py", "there is no flag --nodes; did you mean --nnodes?"),
    "unknown fleet": ("--fleet cloud ok.py", "--fleet cloud: there is no such fleet"),
    "unknown setting": ("--set recovery.grace=3 ok.py", "there is no setting 'recovery.grace'"),
    "misspelt setting": ("--set hang.stnace=act ok.py", "hang.stance"),
    "misspelt section": ("--set hagn.stance=act ok.py", "mean hang"),
    "unknown section": ("--set retry.grace=3 ok.py", "there is no section 'retry'"),
    "a setting of the wrong kind": (
        "--set recovery.attempts=many ok.py",
        "recovery.attempts must be a whole number, not 'many'",
    ),
    "contradiction": ("--set silence.silence_s=1 ok.py", "silence.silence_s must be at least two beats"),
    "parity of two copies": (
        "--set backup.copies=2 --set backup.parity=true ok.py",
        "backup.parity and backup.copies=2 exclude each other",
    ),
    "three copies": ("--set backup.copies=3 ok.py", "backup.copies must be 1 or 2"),
    "bad config": ("--config bad.toml ok.py", "the config file bad.toml is not valid TOML"),
    "log dir": ("--log-dir file/logs ok.py", "cannot write to the log directory"),
    "run dir": ("--run-dir file/run ok.py", "cannot make the run directory"),
    "resume of no run": ("--resume empty", "empty is no run id, and no run id begins"),
    "resume of nothing": ("--resume ./nowhere", "nowhere is not a run directory"),
    "no token": ("--rdzv-endpoint 192.0.2.1:29400 ok.py", "so a join token is needed: set HOLDFAST_TOKEN"),
    "an empty token": ("--rdzv-endpoint 192.0.2.1:29400 --token-file file ok.py", "the token in file is empty"),
    "an empty token here": ("--rdzv-endpoint 127.0.0.1:29400 --token-file file ok.py", "the token in file is empty"),
    "a short token": ("--rdzv-endpoint 192.0.2.1:29400 --token-file short ok.py", "needs at least 128 random bits"),
    "no text": ("--rdzv-endpoint 192.0.2.1:29400 --token-file bytes ok.py", "the token file bytes is not text"),
    "no such host": ("--rdzv-endpoint no-such-host.invalid:1 --token-file token ok.py", "cannot resolve no-such"),
}


def refused(capfd: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence with which a command is refused."""
    assert main(list(argv)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"holdfast {argv[0]}: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("what", REFUSED)
def test_refused(place: Path, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    words, sentence = REFUSED[what]
    assert sentence in refused(capfd, "run", *words.split())


def test_a_port_in_use(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        assert f"port {port} " in refused(capfd, "run", "--port", port, "ok.py")


def test_a_run_dir_that_holds_a_run(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "old").mkdir()
    (place / "old" / "run.json").write_text("{}")
    assert "--resume" in refused(capfd, "run", "--run-dir", "old", "ok.py")
    assert "run.json" in refused(capfd, "run", "--resume", "./old")


@pytest.mark.parametrize("command", ["report", "status", "stop", "clean"])
def test_other_commands_say_what_is_missing(place: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_directory.NO_RUN in refused(capfd, command)
    assert "empty " in refused(capfd, command, "empty")
    assert "nowhere " in refused(capfd, command, "nowhere")


def test_a_report_of_a_run_that_never_began(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = run_dir_creation.make_run_dir(str(place / "new"), "new")
    job = Job(run_id="new", min_nodes=1, max_nodes=1)
    entry = EntryPoint(argv=("ok.py",))
    run = RunSpec(job=job, entry=entry, settings=Settings(), fleet="local", nproc=1, log_dir=str(place))
    run_dir_creation.publish_run(run_dir, run)
    assert str(run_dir) in refused(capfd, "report", "./new")
    (run_dir / "journal.db").write_bytes(b"this is no database" * 100)
    assert "journal.db" in refused(capfd, "report", "./new")
    assert "journal.db" in refused(capfd, "run", "--resume", "./new")


def test_there_is_no_such_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    said = capfd.readouterr().err
    assert "'fly'" in said and ", ".join(COMMANDS) in said and said.count("\n") == 1


@pytest.mark.e2e
def test_resume_of_a_run_that_runs_or_has_ended(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    job = start()
    job.trains()
    assert "holdfast status" in refused(capfd, "run", "--resume", str(job.run_dir))
    job.finish()
    job.ends(0)
    assert "holdfast report" in refused(capfd, "run", "--resume", str(job.run_dir))
