"""A real job is struck by real faults: each does what it says, is written down, and the job comes back."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos import process_handles
from holdfast.chaos.injection_records import InjectedFault
from holdfast.chaos.job_observer import JobObserver
from holdfast.chaos.scenario import Scenario
from holdfast.chaos.striker import NAME, Striker, is_good
from holdfast.chaos.undo_guard import UndoGuard
from holdfast.cli import main
from tests.cli.conftest import Start
from tests.cli.driver import Job, gone
from tests.cli.test_run_health import machines

pytestmark = pytest.mark.e2e
DEAF = ("--set", "silence.silence_s=60", "--set", "node.lost_s=120")
CALM = ("--set", "silence.silence_s=6")  # an agent that was killed is back by then, on a busy machine too


def lines(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.run_dir / NAME).read_text().splitlines()]


def standby(job: Job) -> None:
    job.until(lambda: [n for n in job.status().get("nodes", ()) if n["role"] == "ready"], "a standby")


def test_one_after_the_other_is_struck(start: Start) -> None:
    job = start("--nnodes", "2", *CALM)
    job.trains()
    faults = (InjectedFault(kind="rank.kill", rank=1), InjectedFault(kind="agent.kill", rank=0))
    with UndoGuard() as guard:
        results = Striker(JobObserver(job.run_dir), guard, 1, lambda text: None).run(Scenario(fault=faults))
    assert is_good(results) and len(results) == 2, job.story()
    truths = [line for line in lines(job) if line["line"] == "struck"]
    assert [truth["fault"]["kind"] for truth in truths] == ["rank.kill", "agent.kill"]
    assert gone(*(pid for truth in truths for pid in truth["pids"]))
    assert truths[0]["ranks"] == [1] and truths[0]["nodes"] and truths[0]["alarms"] == ["crash"]
    assert results[1].seen is None
    job.finish()
    job.ends(0)
    assert [record.kind for record in job.report().incidents] == ["crash"]


@pytest.mark.slow
def test_processes_are_struck_and_the_truth_is_written(start: Start) -> None:
    job = start("--nnodes", "2", "--standbys", "1", *CALM)
    job.trains()
    standby(job)
    faults = (
        InjectedFault(kind="rank.kill", rank=1),
        InjectedFault(kind="agent.kill", rank=0),
        InjectedFault(kind="controller.kill"),
        InjectedFault(kind="store.kill"),
        InjectedFault(kind="rank.segv", rank=0),
        InjectedFault(kind="node.kill", rank=1),
    )
    said: list[str] = []
    with UndoGuard() as guard:
        results = Striker(JobObserver(job.run_dir), guard, 1, said.append).run(Scenario(fault=faults))
    assert is_good(results) and len(results) == 6, (said, job.story())
    found = lines(job)
    truths = [line for line in found if line["line"] == "struck"]
    assert [truth["fault"]["kind"] for truth in truths] == [fault.kind for fault in faults]
    assert gone(*(pid for truth in truths for pid in truth["pids"]))
    assert truths[0]["ranks"] == [1] and truths[0]["nodes"] and truths[0]["alarms"] == ["crash"]
    assert results[5].evicted == tuple(truths[5]["nodes"])
    assert {result.seen for result in results[1:4]} == {None}
    job.finish()
    job.ends(0)
    assert [record.kind for record in job.report().incidents] == ["crash", "crash", "silence"]
    job.check_replay()


@pytest.mark.slow
def test_a_stopped_process_is_let_go_at_the_end(start: Start) -> None:
    job = start("--nnodes", "2", *DEAF)
    job.trains()
    with UndoGuard() as guard:
        striker = Striker(JobObserver(job.run_dir), guard, 1, lambda text: None)
        striker.strike_fault(InjectedFault(kind="agent.stop", rank=0), 20)
        pid = lines(job)[-1]["pids"][0]
        job.until(lambda: process_handles.process_state(pid) == "T", "the agent stands")
        striker.strike_fault(InjectedFault(kind="rank.stop", rank=1), 20)
        job.until(lambda: process_handles.process_state(job.rank(1)) == "T", "the rank stands")
        striker.undo_all()
        assert process_handles.process_state(pid) != "T" and process_handles.process_state(job.rank(1)) != "T"
    job.finish()
    job.ends(0)


@pytest.mark.slow
def test_a_blast_and_a_standby(start: Start) -> None:
    job = start("--nnodes", "3", "--standbys", "2", *CALM)
    job.trains()
    job.until(lambda: sum(n["role"] == "ready" for n in job.status().get("nodes", ())) == 2, "two standbys")
    faults = (InjectedFault(kind="standby.kill", overlap=True), InjectedFault(kind="blast", count=2))
    with UndoGuard() as guard:
        results = Striker(JobObserver(job.run_dir), guard, 2, lambda text: None).run(Scenario(fault=faults))
    truths = [line for line in lines(job) if line["line"] == "struck"]
    assert len(truths[0]["nodes"]) == 1 and len(truths[1]["nodes"]) == 2
    assert gone(*truths[0]["pids"], *truths[1]["pids"])
    assert results[1].back_s is not None and set(results[1].evicted) == set(truths[1]["nodes"]), job.story()
    job.finish()
    job.ends(0)


@pytest.mark.slow
def test_a_kernel_line_evicts(start: Start, tmp_path: Path) -> None:
    root = tmp_path / "machines"
    flags = ("--set", machines(root), "--set", "health.kernel_s=0.2")
    job = start("--nnodes", "2", "--standbys", "1", *flags)
    job.trains()
    standby(job)
    with UndoGuard() as guard:
        [result] = Striker(JobObserver(job.run_dir), guard, 1, print).run(
            Scenario(fault=(InjectedFault(kind="kernel.mce", rank=1),))
        )
    [truth] = [line for line in lines(job) if line["line"] == "struck"]
    assert (result.seen, result.named) == (True, True) and list(result.evicted) == truth["nodes"]
    job.finish()
    job.ends(0)


def test_what_cannot_be_done_is_skipped_and_said(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start("--nproc-per-node", "1")
    job.trains()
    scenario = job.folder / "s.toml"
    kinds = ("bits", "kernel.xid", "gpu", "disk.full", "link.cut", "clock.jump", "storage", "checkpoint.flip")
    scenario.write_text("".join(f'[[fault]]\nkind = "{kind}"\n' for kind in kinds))
    assert main(["chaos", "run", str(scenario), str(job.run_dir), "--yes"]) == 3, "all was skipped"
    said = capsys.readouterr().err
    found = {line["fault"]["kind"]: line["why"] for line in lines(job) if line["line"] == "skipped"}
    assert set(found) == set(kinds)
    assert all(f"skipped {kind}: {why}" in said for kind, why in found.items())
    assert "--preload holdfast.chaos.inrank" in found["bits"]
    job.finish()
    job.ends(0)


def test_a_person_is_asked(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start("--nproc-per-node", "1")
    job.trains()
    assert main(["chaos", "random", "--seed", "1", "--minutes", "1", str(job.run_dir)]) == 2
    said = capsys.readouterr()
    assert "--yes" in said.err and "rank.kill after_s=" in said.out
    assert not (job.run_dir / NAME).exists() and job.status()["generation"] == 1
    job.finish()
    job.ends(0)
    assert main(["chaos", "random", "--seed", "1", "--minutes", "1", str(job.run_dir), "--yes"]) == 2
    assert "code 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_injector_is_killed_and_its_fault_undone(start: Start) -> None:
    job = start("--nnodes", "2", *DEAF)
    job.trains()
    scenario = job.folder / "s.toml"
    scenario.write_text('[[fault]]\nkind = "agent.stop"\nrank = 1\n')
    argv = [sys.executable, "-m", "holdfast.cli", "chaos", "run", str(scenario), str(job.run_dir), "--yes"]
    injector = subprocess.Popen(argv, stderr=subprocess.DEVNULL, env=os.environ)
    agent = job.agent(next(n["node"] for n in job.status()["nodes"] if n["ranks"] == "1"))
    job.until(lambda: process_handles.process_state(agent) == "T", "the agent stands")
    injector.send_signal(signal.SIGKILL)
    injector.wait()
    job.until(lambda: process_handles.process_state(agent) != "T", "the agent goes on")
    job.finish()
    job.ends(0)


def test_the_list_says_what_can_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "list"]) == 0
    assert "rank.kill" in capsys.readouterr().out
    assert main(["chaos", "list", "--json"]) == 0
    rows = {row["kind"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["rank.kill"]["lacks"] == "" and "wall clock" in rows["clock.jump"]["lacks"]
