"""Who follows a run on Slurm follows it into its next job, and is not told that it has ended while it goes on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from holdfast.cli import main
from holdfast.cli.run_dirs import run_directory, run_liveness
from holdfast.cli.run_dirs.run_continuation import RunContinuation
from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import ControllerAddress, RunEnd
from tests.cli.driver import until
from tests.cli.test_run_selection import home, published
from tests.conftest import job_environment

pytestmark = pytest.mark.e2e
__all__ = ["home"]


class Slurm:
    """A squeue that knows one job, as a script."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        folder.mkdir()
        self.path = f"{folder}:/usr/bin:/bin"
        look = f"""case "$*" in *--steps*) ;; *) cat {self.state} ;; esac"""
        for name, does in (("squeue", look), ("sinfo", "echo slurm 22.05.8")):
            (folder / name).write_text(f"#!/bin/sh\n{does}\n")
            (folder / name).chmod(0o755)
        self.tell("")

    def tell(self, state: str, reason: str = "None") -> None:
        """From now on job 47 is in this state; "": Slurm does not know it."""
        self.state.write_text(f"47|{state}|{reason}|N/A|N/A||holdfast-r|(null)|\n" if state else "")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm = Slurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", slurm.path)
    monkeypatch.setattr("holdfast.cli.run_dirs.run_continuation._ASK_S", 0.0)
    monkeypatch.setattr("holdfast.cli.run_dirs.run_continuation._SOON_S", 0.0)
    return slurm


def run_on_slurm(allocation: int = 46) -> Path:
    run_dir = published(None, "r")
    run = msgspec.structs.replace(run_directory.read_spec(run_dir), fleet="slurm", allocation=allocation)
    run_and_node_specs.write_json(run_dir / "run.json", run)
    return run_dir


def end(run_dir: Path, code: int) -> None:
    run_and_node_specs.write_json(run_dir / "exit.json", RunEnd(code=code, reason="because"))


def followed(run_dir: Path) -> tuple[RunContinuation, list[str]]:
    said: list[str] = []
    return RunContinuation(run_dir, run_directory.read_spec(run_dir), said.append), said


def test_a_run_whose_next_job_waits_goes_on(home: Path, slurm: Slurm) -> None:
    run_dir = run_on_slurm()
    ending, said = followed(run_dir)
    assert not ending.is_over()
    end(run_dir, OUT_OF_TIME)
    run_dir.with_name("r.job").write_text("47\n")
    slurm.tell("PENDING", "Dependency")
    assert not ending.is_over() and not ending.is_over()
    assert said == ["all nodes were taken away; job 47 of Slurm goes on with the run, and is in the queue (Dependency)"]
    slurm.tell("RUNNING")
    assert not ending.is_over()
    (run_dir / "exit.json").unlink()
    assert not ending.is_over() and not ending.is_over()
    assert said[1:] == ["all nodes were taken away; job 47 of Slurm goes on with the run", "the run goes on"]
    end(run_dir, 0)
    assert ending.is_over()


@pytest.mark.parametrize("state", ["", "CANCELLED", "COMPLETED"])
def test_a_run_whose_next_job_is_over_has_ended(home: Path, slurm: Slurm, state: str) -> None:
    run_dir = run_on_slurm()
    run_dir.with_name("r.job").write_text("47\n")
    end(run_dir, OUT_OF_TIME)
    slurm.tell(state)
    ending, said = followed(run_dir)
    assert ending.is_over() and not said
    run_dir.with_name("r.job").unlink()
    assert followed(run_dir)[0].is_over(), "nor does one go on that no batch job carries"


def test_a_job_that_is_just_ending_is_not_said_to_go_on(home: Path, slurm: Slurm) -> None:
    run_dir = run_on_slurm(allocation=47)
    run_dir.with_name("r.job").write_text("47\n")
    end(run_dir, OUT_OF_TIME)
    slurm.tell("RUNNING")
    ending, said = followed(run_dir)
    assert not ending.is_over() and not said
    slurm.tell("PENDING", "BeginTime")
    assert not ending.is_over() and len(said) == 1, "Slurm starts it again"
    slurm.tell("CANCELLED")
    assert ending.is_over()


def test_a_front_outside_of_its_jobs_has_a_moment_to_go_on(home: Path, slurm: Slurm) -> None:
    """It removes the file that says 95, and asks for other nodes; from another host nobody sees whether it lives."""
    run_dir = run_on_slurm(allocation=0)
    end(run_dir, OUT_OF_TIME)
    ending, said = followed(run_dir)
    assert not ending.is_over() and not said
    old = time.time() - 100
    os.utime(run_dir / "exit.json", (old, old))
    assert ending.is_over()
    end(run_dir, 143)
    assert followed(run_dir)[0].is_over()


def attach(run_dir: Path, output: Path, **env: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "holdfast", "attach", "--run", str(run_dir)]
    with output.open("ab") as file:
        return subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=job_environment() | env
        )


def test_attach_follows_a_run_from_the_queue_to_its_end(home: Path, slurm: Slurm, tmp_path: Path) -> None:
    run_dir, output = run_on_slurm(), tmp_path / "output"
    run_dir.with_name("r.job").write_text("47\n")
    slurm.tell("PENDING", "Resources")
    end(run_dir, OUT_OF_TIME)
    process = attach(run_dir, output, PATH=slurm.path, HOLDFAST_HOME=str(home))
    try:
        until(lambda: b"following r" in output.read_bytes(), "its first sentence")
        assert b"job 47 of Slurm goes on with the run, and is in the queue (Resources)" in output.read_bytes()
        (run_dir / "exit.json").unlink()  # as the next front does
        (run_dir / "said.log").write_text("holdfast: training: first step after 1.0 s\n")
        until(lambda: b"first step after" in output.read_bytes(), "what the next controller says")
        end(run_dir, 0)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_attach_follows_a_run_whose_controller_is_on_another_host(home: Path, tmp_path: Path) -> None:
    run_dir, output = run_on_slurm(), tmp_path / "output"
    (run_dir / "controller-elsewhere.lock").touch()
    address = ControllerAddress(pid=1, url="https://192.0.2.7:4000", started_at=0.0)
    run_and_node_specs.write_json(run_dir / "controller.json", address)
    process = attach(run_dir, output, HOLDFAST_HOME=str(home))
    try:
        until(lambda: b"following r, whose controller was last on 192.0.2.7;" in output.read_bytes(), "its sentence")
        (run_dir / "said.log").write_text("holdfast: a sentence\n")
        until(lambda: b"holdfast: a sentence" in output.read_bytes(), "what the controller says")
        end(run_dir, 93)
        assert process.wait(60) == 93
    finally:
        process.kill()
        process.wait()


def test_a_run_that_waits_in_the_queue_is_told_with_its_job(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = home / "runs" / "r"
    run_dir.parent.mkdir(parents=True)
    run_dir.with_name("r.job").write_text("47\n")
    told = (
        f"the run in {run_dir} has not begun: job 47 of Slurm is to carry it, and squeue --jobs=47 says why that waits"
    )
    for name in ("r", str(run_dir)):
        assert main(["status", name]) == 2
        assert capsys.readouterr().err == f"holdfast status: {told}\n"
    run_dir = run_on_slurm()
    end(run_dir, OUT_OF_TIME)
    ending = run_liveness.ending_text(run_dir)
    assert ending == "has ended with code 95: because; job 47 of Slurm is to go on with it: squeue --jobs=47"
    end(run_dir, 0)
    assert run_liveness.ending_text(run_dir) == "has ended with code 0: because"
