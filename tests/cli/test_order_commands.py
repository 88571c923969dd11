"""`holdfast hold | resume | approve | evict | drain` on real jobs, and hooks that hear of them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import main
from holdfast.cli.commands import order_commands, update_command
from holdfast.cli.run_dirs import run_directory
from holdfast.core.record.job_account import PLANNED
from holdfast.core.record.release_history import ReleaseChapter
from holdfast.model.code_release import Fate, Release
from holdfast.wire.controller_request import ControllerNotRunning, RequestRefused
from tests.cli.conftest import Start
from tests.cli.console_transcript import assert_screens
from tests.cli.driver import PATIENCE_S, ROOT, TRAIN, Job, gone
from tests.cli.test_run_state import TRAIN as STATE
from tests.cli.test_run_state import said

e2e = pytest.mark.e2e

# Fails at once, until there is a file `mended`.
FAILING = "import holdfast\nif not os.path.exists(f'{sys.argv[1]}/mended'): int('x')\n"
BROKEN = TRAIN.replace("import holdfast\n", FAILING)
PATIENT = ("--set", "silence.silence_s=20")  # no node is lost here, however busy the machine is


def command(job: Job, *words: str) -> "subprocess.Popen[str]":
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "holdfast.cli", *words, "--run", str(job.run_dir)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def says(job: Job, *words: str, code: int = 0) -> str:
    """What a command prints, and that it ends as it should."""
    process = command(job, *words)
    try:
        output, _ = process.communicate(timeout=3 * PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"{words} did not end:\n{output}\n{job.story()}") from None
    assert process.returncode == code, f"{output}\n{job.story()}"
    return output


def roles(job: Job) -> dict[str, str]:
    return {view["node"]: view["role"] for view in job.status().get("nodes", ())}


def seats(job: Job) -> dict[str, str]:
    return {view["ranks"]: view["node"] for view in job.status()["nodes"] if view["role"] == "active"}


def test_a_script_without_steps_goes_on_when_its_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: dict[str, Any] = {"phase": "starting", "ettr": None, "step": -1, "held": "", "asking": "", "nodes": []}
    now, gait = 100.0, order_commands.Gait()
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert not gait.goes_on(runs), "a first step may come presently"
    now += order_commands.STEPLESS_S
    assert gait.goes_on(runs) and not gait.goes_on(runs | {"ettr": 0.5, "step": 7}), "its next step is waited for"
    assert not gait.goes_on(runs), "that was another generation"
    assert gait.goes_on(runs | {"phase": "training"}) and not gait.goes_on(runs | {"phase": "launching"})
    held = runs | {"phase": "held"}
    counted = held | {"step": 7, "since": "the last launch"}
    screens = {
        "resumed, and no step is seen": order_commands._done_text(runs, {"verb": "resume"}, True),
        "evicted, and no step is seen": order_commands._done_text(runs, {"verb": "evict", "node": "n1"}, True),
        "held, and no step is seen": order_commands._done_text(held, {"verb": "hold"}, False),
        "held, and steps are counted": order_commands._done_text(counted, {"verb": "hold"}, False),
    }
    there = held | {"nodes": [{"node": "n1", "role": "active"}]}
    resumes = "n1 leaves when the job resumes"
    assert order_commands._done_text(there, {"verb": "evict", "node": "n1"}, False) == resumes
    drained = order_commands._done_text(there, {"verb": "drain", "node": "n1"}, False)
    assert drained == f"{resumes}, once a standby can take its seat"
    assert_screens("orders", screens)


def test_a_release_that_waits_for_a_person() -> None:
    status = {"phase": "held", "held": "", "asking": "rank 0 failed"}
    chapter = ReleaseChapter(release=Release(number=2), fate=Fate.WAITING, at=1.0)

    def told(status: dict[str, Any], *, now: bool = False) -> tuple[str, int | None]:
        return update_command._progress_line(
            chapter, now, False, update_command._awaited_text(status, now, 86400.0), 1.0
        )

    comes = "release 2 is staged; it comes in with the next restart"
    asks = f"{comes}: the job asks a person, and holdfast approve restarts it now"
    assert (told(status), told(status, now=True)) == ((asks, 0), (asks, None))
    held = status | {"held": "ann", "asking": ""}
    assert told(held) == (f"{comes}: the job is held, and holdfast resume restarts it now", 0)
    trains = held | {"phase": "training", "held": ""}
    assert told(trains) == (f"{comes}, at the latest in 24 h 00 min", 0)
    assert told(trains, now=True) == ("release 2 is staged; the job restarts with it", None)


@e2e
@pytest.mark.slow
def test_hold_and_resume_with_a_controller_killed_in_between(start: Start) -> None:
    job = start("--nnodes", "2", *PATIENT)
    job.trains()
    first = job.ranks(2)
    says(job, "resume", code=2)
    says(job, "approve", code=2)
    says(job, "hold")
    assert job.phase() == "held" and gone(*first)
    steps = [(job.folder / f"step-{rank}").read_text() for rank in (0, 1)]
    says(job, "hold", code=2)
    controller = job.controller()
    job.kill(controller)
    job.until(lambda: job.phase() == "held" and job.controller() != controller, "the next controller, which holds too")
    assert job.status()["held"] and job.status()["held"] in says_status(job)
    assert [(job.folder / f"step-{rank}").read_text() for rank in (0, 1)] == steps
    says(job, "resume")
    job.trains(generation=2)
    job.says("; ending all ranks")
    job.says("until holdfast resume")
    job.finish()
    job.ends(0)
    report = job.report()
    assert (len(report.incidents), len(report.changes)) == (0, 1)
    [change] = report.changes
    assert change.held_s > 0 and change.evicted == change.admitted == ()
    assert report.spent_s["hold"] == pytest.approx(change.held_s, abs=0.5)
    assert PLANNED in report.lost_s
    assert job.check_replay() > 5


def says_status(job: Job) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "250"}
    argv = [sys.executable, "-m", "holdfast.cli", "status", str(job.run_dir)]
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=True).stdout


@e2e
@pytest.mark.slow
def test_evict_a_node_that_trains_and_one_that_does_not(start: Start) -> None:
    job = start("--nnodes", "2", "--standbys", "1", *PATIENT)
    job.trains()
    job.until(lambda: "ready" in roles(job).values(), "a standby")
    seated = seats(job)
    kept, leaving = job.holder(seated["0"]), job.holder(seated["1"])
    said = says(job, "evict", "nowhere", code=2)
    assert "'nowhere'" in said and "n0, n1, n2" in said
    assert seated["1"] in says(job, "evict", seated["1"]) and job.phase() == "training"
    assert seats(job)["0"] == seated["0"] and seats(job)["1"] != seated["1"]
    assert not gone(kept)
    job.until(lambda: gone(leaving), "the end of the node that was evicted")
    standby = job.until(lambda: [n for n, role in roles(job).items() if role == "ready"], "the pool is refilled")[0]
    assert f"{standby} " in says(job, "drain", standby)
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    report = job.report()
    assert (len(report.incidents), len(report.changes)) == (0, 1)
    assert report.changes[0].evicted == (seated["1"],)
    assert job.check_replay() > 5


@e2e
@pytest.mark.slow
def test_drain_a_node(start: Start) -> None:
    job = start("--nnodes", "2", "--standbys", "1", *PATIENT)
    job.trains()
    job.until(lambda: "ready" in roles(job).values(), "a standby")
    node = seats(job)["1"]  # whichever came in time has a seat
    assert node in says(job, "drain", node) and job.phase() == "training"
    assert node not in seats(job).values()
    job.finish()
    job.ends(0)
    assert [change.evicted for change in job.report().changes] == [(node,)]


@e2e
def test_a_person_is_asked_and_told_by_a_hook(start: Start, tmp_path: Path) -> None:
    hook = f"cat >> {tmp_path}/told; echo >> {tmp_path}/told"
    job = start("--on-incident", hook, "--set", "hook.least_s=0", *PATIENT, script=BROKEN)
    job.until(lambda: job.status().get("asking"), "a question")
    status = job.status()
    assert "ValueError" in status["asking"] and status["phase"] == "held"
    left_s: float = status["asks_until"] - job.report().start_at
    assert left_s > 14400
    assert "holdfast approve" in says_status(job)
    says(job, "resume", code=2)
    job.until((job.run_dir / "hooked.json").exists, "that the hook was told")
    controller = job.controller()
    job.kill(controller)  # the next one asks still, and does not tell it again
    job.until(lambda: job.status().get("asking") and job.controller() != controller, "the next controller")
    (tmp_path / "mended").touch()
    says(job, "approve")
    assert job.phase() == "training"
    job.finish()
    job.ends(0)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [notice["topic"] for notice in told] == ["asking", "incident", "ended"]
    assert "ValueError" in told[0]["text"] and told[1]["incident"]["number"] == 1 and told[2]["code"] == 0
    assert job.check_replay() > 5


@e2e
@pytest.mark.slow
def test_an_order_outlives_the_controller_that_was_to_take_it(start: Start) -> None:
    job = start(*PATIENT)
    job.trains()
    controller = job.controller()
    os.kill(controller, signal.SIGSTOP)  # it takes the connection and never answers
    process = command(job, "hold")
    job.kill(controller)
    output, _ = process.communicate(timeout=3 * PATIENCE_S)
    assert process.returncode == 0 and re.search(r" step \d+\b", output), f"{output}\n{job.story()}"
    job.until(lambda: job.phase() == "held", "the hold")
    job.finish()
    says(job, "resume", "--no-wait")
    job.ends(0)


@e2e
@pytest.mark.slow
def test_a_job_goes_on_with_fewer_nodes_and_grows_back(start: Start) -> None:
    flags = ("--nnodes", "2", "--min-nodes", "1", "--set", "recovery.last_call_s=20", "--set", "silence.silence_s=5")
    job = start(*flags)
    job.until(lambda: job.phase() == "training" and len(seats(job)) == 2, "all nodes", 2 * PATIENCE_S)
    job.kill(job.holder(seats(job)["1"]))
    job.until(lambda: job.phase() == "training" and len(seats(job)) == 1, "training on one node", 2 * PATIENCE_S)
    job.until(lambda: job.phase() == "training" and len(seats(job)) == 2, "training on two nodes again", 2 * PATIENCE_S)
    job.finish()
    job.ends(0)
    report = job.report()
    assert len(report.incidents[-1].evicted) == 1 and report.incidents[-1].admitted == ()
    assert len(report.changes[-1].admitted) == 1
    assert job.check_replay() > 5


@e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nobody_can_tell_afterwards(start: Start) -> None:
    """Held, resumed, and one node evicted for a standby: no step is lost, and the weights are those of a calm run."""
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--standbys", "1", *PATIENT)
    calm = start(*flags, script=STATE, name="calm", HOLDFAST_STEPS="200")
    calm.ends(0, patience_s=200)
    calm.run_dir.rename(calm.folder / "calm-run")
    job = start(*flags, script=STATE, HOLDFAST_STEPS="200")
    job.trains()
    says(job, "hold")
    job.until(lambda: "ready" in roles(job).values(), "a standby that has passed its check", patience_s=200)
    says(job, "resume")
    leaving = next(view["node"] for view in job.status()["nodes"] if view["ranks"] == "2-3")
    says(job, "evict", leaving)
    job.ends(0, patience_s=200)
    report = job.report()
    held, evicted = report.changes
    assert report.incidents == () and evicted.evicted == (leaving,) and len(evicted.admitted) == 1
    for change, restart in zip(report.changes, report.restarts, strict=True):
        assert change.resumed_from is not None and change.good_step - change.resumed_from <= 1
        assert {"stop", "launch", "imports and groups", "restore", "first step"} <= set(restart.phases_s)
        assert sum(restart.phases_s.values()) == pytest.approx(restart.lost_s)
    assert held.held_s > 0 and evicted.held_s == 0
    assert {words[0] for words in said(job, "weights")} == {words[0] for words in said(calm, "weights")}
    assert job.check_replay() > 5


# --- without a job ----------------------------------------------------------------------------------------------------


class Port:
    """A controller's port, whose first answer to an order is lost."""

    def __init__(self, taken: bool) -> None:
        self.taken = taken
        self.orders: list[dict[str, Any]] = []

    def ask(self, run_dir: Path, path: str, body: dict[str, Any] | None = None) -> Any:
        if path == "/api/v1/status":
            return {"seq": 7}
        if path == "/api/v1/orders" and body:
            self.orders.append(body)
            if len(self.orders) == 1:
                raise ControllerNotRunning("it broke off")
            return {"next": "it is done"}
        after = int(path.partition("after=")[2])
        kept: list[dict[str, Any]] = [{"seq": 8, "event": {"type": "tick"}}]
        kept.append({"seq": 9, "event": {"type": "order", **self.orders[0]}})
        return [entry for entry in kept if self.taken and entry["seq"] > after]


@pytest.mark.parametrize(("taken", "times"), [(True, 1), (False, 2)])
def test_an_order_is_given_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: bool, times: int) -> None:
    port = Port(taken)
    monkeypatch.setattr(order_commands, "ask_controller", port.ask)
    assert order_commands.give_order(tmp_path, {"verb": "drain", "node": "n1"})
    assert len(port.orders) == times


def test_a_refusal_is_not_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ask(run_dir: Path, path: str, body: dict[str, Any] | None = None) -> Any:
        if body:
            raise RequestRefused("no", 400)
        return {"seq": 1}

    monkeypatch.setattr(order_commands, "ask_controller", ask)
    with pytest.raises(RequestRefused):
        order_commands.give_order(tmp_path, {"verb": "hold"})


@pytest.mark.parametrize("verb", ["hold", "resume", "approve"])
def test_without_a_run(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    assert main([verb]) == 2
    assert f"holdfast {verb}: {run_directory.NO_RUN}" in capsys.readouterr().err


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("hold", "resume", "approve", "evict", "drain"):
        assert main([verb, "--help"]) == 0
        assert f"usage: holdfast {verb}" in capsys.readouterr().out
