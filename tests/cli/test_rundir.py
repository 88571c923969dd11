"""Run directories: made, found, and who is alive in one."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.cli import rundir
from holdfast.cli.flagtable import UsageError
from holdfast.config import Settings
from holdfast.model.topology import Job
from holdfast.wire import spec
from holdfast.wire.environment import rank_environment
from holdfast.wire.spec import Ended, Entry, Listening, RunSpec


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def published(run_dir: Path) -> Path:
    job = Job(run_id="r", min_nodes=1, max_nodes=1)
    run = RunSpec(job=job, entry=Entry(argv=("x",)), settings=Settings(), fleet="local", nproc=1, log_dir="/l")
    rundir.publish(run_dir, run)
    return run_dir


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rundir.home() == tmp_path / "home"
    monkeypatch.setenv("HOLDFAST_HOME", "")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert rundir.home() == Path("/state/holdfast")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/me")
    assert rundir.home() == Path("/me/.local/state/holdfast")


def test_what_is_secret_is_for_its_owner(home: Path) -> None:
    run_dir = published(rundir.make(None, "r"))
    assert run_dir == home / "runs" / "r"
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    for name in ("token", "env.json"):
        assert stat.S_IMODE((run_dir / name).stat().st_mode) == 0o600
    assert len(rundir.token(run_dir)) == 32
    assert rundir.node_environment(run_dir) == rank_environment(os.environ)
    assert rundir.read_spec(run_dir).job.run_id == "r"


def test_the_same_id_twice_and_ids_that_are_no_names(home: Path) -> None:
    first = published(rundir.make(None, "../../my job"))
    second = published(rundir.make(None, "../../my job"))
    assert first == home / "runs" / ".._.._my_job"
    assert second.parent == first.parent and second.name.startswith(first.name + "-")
    logs = [rundir.make_log_dir(str(home / "logs"), first, "a/b") for _ in range(2)]
    assert len(set(logs)) == 2 and all(log.parent == home / "logs" for log in logs)
    assert rundir.make_log_dir(None, first, "a/b") == first / "logs"


def test_a_directory_that_holds_a_run_is_not_used_again(tmp_path: Path) -> None:
    run_dir = published(rundir.make(str(tmp_path / "here"), "r"))
    with pytest.raises(UsageError, match="holds a run already"):
        rundir.make(str(run_dir), "r")


def test_finding(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="there is no run yet"):
        rundir.find(None)
    by_id, by_path = published(rundir.make(None, "r")), published(rundir.make(str(tmp_path / "here"), "s"))
    rundir.mark_newest(by_id)
    rundir.mark_newest(by_path)
    assert rundir.find(None) == by_path
    assert rundir.find("r") == by_id
    monkeypatch.chdir(tmp_path)
    assert rundir.find("here") == by_path
    with pytest.raises(UsageError, match="is no run directory"):
        rundir.find("home")
    assert not list(home.glob(".newest*"))


def test_a_home_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "file" / "home"))
    rundir.mark_newest(tmp_path)


def test_who_listens(tmp_path: Path) -> None:
    run_dir, other = published(rundir.make(None, "r")), published(rundir.make(None, "s"))
    assert rundir.listening(run_dir) is None
    code = "import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, rundir.CONTROLLER, str(run_dir), "3"])
    try:
        until = time.monotonic() + 10
        listening = Listening(url="http://127.0.0.1:1", pid=process.pid, started_at=0.0)
        for folder in (run_dir, other):
            spec.write(folder / "controller.json", listening)
        while rundir.listening(run_dir) is None and time.monotonic() < until:
            time.sleep(0.01)
        (tmp_path / "link").symlink_to(run_dir)
        assert rundir.listening(tmp_path / "link") == listening
        assert rundir.listening(other) is None, "that pid is the controller of another run"
    finally:
        process.kill()
        process.wait()
    assert rundir.listening(run_dir) is None
    (run_dir / "controller.json").write_text("{")
    assert rundir.listening(run_dir) is None


def test_how_a_run_has_ended() -> None:
    run_dir = published(rundir.make(None, "r"))
    assert rundir.ending(run_dir) == "has no controller now"
    spec.write(run_dir / "exit.json", Ended(code=93, reason="enough"))
    assert rundir.ending(run_dir) == "has ended with code 93: enough"


def test_addresses() -> None:
    assert rundir.web_address("host", 1) == "http://host:1"
    assert rundir.web_address("::1", 1) == "http://[::1]:1"
