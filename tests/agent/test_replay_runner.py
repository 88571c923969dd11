"""Ranks of a replay: watched through slots of their own, ended when they are done, and never training's business."""

import asyncio
import os
import sys
import time
from pathlib import Path

from holdfast.agent.diagnostics.replay_runner import run_replay
from holdfast.core.incident.incident_text import describe_exit
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import LaunchHere, ReplayHere
from holdfast.model.replay_task import ReplayResult, ReplayTask
from holdfast.wire.run_and_node_specs import EntryPoint
from tests.cli.driver import ROOT

STEPS = """
import os, sys, time
import holdfast
from holdfast.client.training.progress import here
from holdfast.wire import replay_environment

holdfast.replayable()
rank = int(os.environ["RANK"])
path = replay_environment.signature_path(os.environ["HOLDFAST_REPLAY_FOLDER"], rank)
told = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
assert "HOLDFAST_KEEPER" not in os.environ
for step in range(1, 1000):
    here.step(step, loss=float("nan") if (rank, step) == {nan} else 1.0)
    os.write(told, replay_environment.encode_signature(step, 1000 * rank + step, 7 * step))
    if (rank, step) == {crash}:
        sys.exit(3)
    if (rank, step) == {hang}:
        time.sleep(600)
    time.sleep(0.04)
"""


def played(
    folder: Path, within_s: float = 30.0, steps: int = 8, pause: str = "0.04", **when: tuple[int, int]
) -> tuple[ReplayResult, ...]:
    script = STEPS.replace("0.04", pause)
    for name in ("nan", "crash", "hang"):
        script = script.replace(f"{{{name}}}", repr(when.get(name)))
    (folder / "script.py").write_text(script)
    seat = Seat(node="n0", group_rank=0, first_rank=2, nproc=2)
    launch = LaunchHere(
        id=-5,
        generation=3,
        seat=seat,
        world_size=4,
        group_world_size=2,
        store_host="127.0.0.1",
        store_port=1,
        run_id="r",
        max_restarts=0,
    )
    errand = ReplayHere(id=-5, launch=launch, replay=ReplayTask(name="1-1-h0", steps=steps), within_s=within_s)
    entry = EntryPoint(argv=(str(folder / "script.py"),), python=sys.executable, cwd=str(folder))
    mark = f"PLAYED_{folder.name}"

    def environment(local: int) -> dict[str, str]:
        own = {"RANK": str(2 + local), "LOCAL_RANK": str(local), "HOLDFAST_GENERATION": "3", "HOLDFAST_KEEPER": "/x"}
        return {**os.environ, "PYTHONPATH": str(ROOT), mark: "1", **own}

    found = asyncio.run(run_replay(errand, entry, folder / "replay", environment))
    assert not [pid for pid in os.listdir("/proc") if pid.isdecimal() and _has(pid, mark)]
    return found


def _has(pid: str, mark: str) -> bool:
    try:
        return f"{mark}=1".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_all_did_their_steps(tmp_path: Path) -> None:
    first, second = played(tmp_path)
    assert [(one.rank, one.ended, one.failed, one.bad_step) for one in (first, second)] == [
        (2, True, False, -1),
        (3, True, False, -1),
    ]
    assert first.marks == {step: 2000 + step for step in range(1, 9)}
    assert first.signed == {step: 7 * step for step in range(1, 9)}


def test_steps_that_take_no_time_are_told_all_the_same(tmp_path: Path) -> None:
    """By two halves the first step that differs is looked for: none may be missing before it."""
    first, _ = played(tmp_path, steps=500, pause="0")
    assert list(first.marks) == list(first.signed) == list(range(1, 501))


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    first, second = played(tmp_path, nan=(3, 4))
    assert (second.bad_step, second.failed) == (4, False)
    assert first.bad_step == -1


def test_a_crash(tmp_path: Path) -> None:
    _, second = played(tmp_path, crash=(3, 4))
    assert second.failed and not second.ended and second.detail == describe_exit(3)


def test_one_that_stands_still(tmp_path: Path) -> None:
    began_at = time.monotonic()
    first, second = played(tmp_path, within_s=5.0, hang=(3, 4))
    assert time.monotonic() - began_at < 40
    assert first.ended and second.failed and second.detail == "did not finish in time"
