"""`holdfast trace` on a job of four gloo ranks that is brought to a stand in one way after another."""

import json
import os
import signal
import time
import xml.etree.ElementTree as ET
from typing import Any

import msgspec
import pytest

from holdfast.cli import main
from holdfast.cli.commands import trace_command
from holdfast.cli.commands.trace_command import acquit_if_moving
from holdfast.cli.run_dirs import run_directory
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.controller.api_description import JobStacks
from holdfast.core.diagnose.blocking_ranks import BlockingRanks
from holdfast.core.diagnose.stack_folding import main_frames
from holdfast.model.rank_traces import Collective, Flight, Frame, Process, Thread, Trace
from tests.cli.conftest import Start
from tests.cli.console_transcript import assert_screens
from tests.cli.driver import Job

SCRIPT = """
import ctypes, datetime, os, sys, time
import torch, torch.distributed as dist
import holdfast

folder, rank = sys.argv[1], int(os.environ["RANK"])

def now(kind):
    try:
        return rank == 1 and open(f"{folder}/kind").read() == kind
    except OSError:
        return False

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        while now("loader"):
            time.sleep(0.1)
        return index

def preprocess():
    while now("sleep"):
        time.sleep(0.1)

def spin():
    while now("gil"):
        ctypes.PyDLL(None).sleep(2)

def cross(side):
    while now("crossed"):
        try:
            dist.all_reduce(torch.ones(1), group=side)
        except RuntimeError:
            break

dist.init_process_group("gloo")
side = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20))
loader = torch.utils.data.DataLoader(Items(), num_workers=int(rank == 1), prefetch_factor=1 if rank == 1 else None)
for step, _ in enumerate(loader, 1):
    preprocess(), spin(), cross(side)
    stop = torch.tensor(float(os.path.exists(f"{folder}/finish")))
    dist.all_reduce(stop)
    time.sleep(0.05)
    holdfast.step(step)
    if stop:
        break
"""


def stand(job: Job) -> None:
    """Wait until the job has made no step for longer than the flight recorders need to tell."""
    last, since = -1, time.monotonic()

    def still() -> bool:
        nonlocal last, since
        step = job.status().get("step", last)
        if step != last:
            last, since = step, time.monotonic()
        return time.monotonic() > since + 2.5

    job.until(still, "the job to stand")


def go_on(job: Job) -> None:
    before = job.status()["step"]
    (job.folder / "kind").unlink(missing_ok=True)
    job.until(lambda: job.status().get("step", 0) > before + 2, "the job to go on")


def look(job: Job, **how: Any) -> tuple[BlockingRanks, dict[int, Process], list[Process]]:
    found = msgspec.convert(ask_controller(job.run_dir, "/api/v1/trace", {"deadline_s": 10.0, **how}, 20.0), JobStacks)
    assert not [trace.error for trace in found.traces if trace.error], found
    processes = [process for trace in found.traces for process in trace.processes]
    return found.naming, {p.rank: p for p in processes if not p.child}, [p for p in processes if p.child]


def stuck(job: Job, kind: str) -> tuple[BlockingRanks, dict[int, Process], list[Process]]:
    (job.folder / "kind").write_text(kind)
    stand(job)
    return look(job)


def innermost(process: Process) -> str:
    return main_frames(process)[-1].function


@pytest.mark.e2e
@pytest.mark.slow
def test_who_keeps_the_others_waiting(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    told = ("--set", "hang.stance=notify")  # a circle is acted on at the second look
    job = start("--nnodes", "2", "--nproc-per-node", "2", *told, script=SCRIPT)
    job.trains()
    for _ in range(3):
        assert main(["trace", "--json", "--run", str(job.run_dir)]) == 0
        assert not json.loads(capsys.readouterr().out)["naming"]["ranks"], "somebody is always last in a job that runs"

    named, mains, children = stuck(job, "sleep")
    assert (named.ranks, named.nodes, named.how, named.hard) == ((1,), ("n0",), "missing", True), named
    assert innermost(mains[1]) == "preprocess" and [innermost(mains[r]) for r in (0, 2, 3)] == ["all_reduce"] * 3
    assert [child.rank for child in children] == [1] and children[0].name.startswith("pt_data")
    shows(job, capsys)
    go_on(job)

    named, mains, children = stuck(job, "loader")
    assert (named.ranks, named.how, named.hard) == ((1,), "missing", True), named
    assert [innermost(child) for child in children] == ["Items.__getitem__"]
    assert " pt_data_worker in Items.__getitem__" in named.reason
    go_on(job)

    named, mains, _ = stuck(job, "gil")
    assert (named.ranks, named.how, named.hard) == ((1,), "missing", True), named
    assert innermost(mains[1]) == "spin"
    go_on(job)

    named, mains, _ = stuck(job, "crossed")
    assert (named.ranks, named.nodes, named.how, named.hard) == ((0, 1), ("n0",), "crossed", False), named
    go_on(job)

    os.kill(mains[1].pid, signal.SIGSTOP)
    named, mains, _ = look(job)
    assert (named.ranks, named.how, named.hard) == ((1,), "stopped", True), named
    assert mains[1].state == "T"
    os.kill(mains[1].pid, signal.SIGCONT)
    job.finish()
    job.ends(0)


def shows(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """What a person sees of rank 1 in its sleep."""
    picture = job.folder / "trace.svg"
    assert main(["trace", str(job.run_dir), "--svg", str(picture)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rank 1 on n0 (missing, ") and " all_reduce " in text
    assert "ranks 0, 2-3: " in text and "preprocess" in text
    labels = [element.text or "" for element in ET.parse(picture).iter()]
    assert any("preprocess" in label and "rank 1" in label for label in labels)
    assert main(["trace", str(job.run_dir), "--json", "--rounds", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["naming"]["ranks"] == [1] and len(found["rounds"]) == 2
    assert main(["trace", str(job.run_dir), "--svg", "/nowhere/x.svg"]) == 2
    assert "/nowhere/x.svg" in capsys.readouterr().err


def test_who_is_last_in_a_job_that_goes_on_is_not_accused() -> None:
    accused = BlockingRanks(ranks=(1,), nodes=("n0",), how="apart", reason="alone")

    def seen(came: int) -> JobStacks:
        groups = (Collective(group="g", entered=came, completed=came),)
        flights = tuple(Flight(node="n0", rank=rank, groups=groups) for rank in (0, 1))
        return JobStacks(at=0.0, naming=accused, traces=(Trace(node="n0", at=0.0, flights=flights),))

    assert acquit_if_moving(seen(5), seen(5), steps=0) == accused
    assert not acquit_if_moving(seen(5), seen(7), steps=0).ranks
    assert not acquit_if_moving(seen(5), seen(5), steps=2).ranks


def look_of(named: BlockingRanks, **states: str) -> JobStacks:
    """Ranks on one node, by their states."""
    found = [Process(node="n0", rank=int(name[1:]), pid=1, state=state) for name, state in states.items()]
    return JobStacks(at=0.0, naming=named, traces=(Trace(node="n0", at=0.0, processes=tuple(found)),))


LATE = BlockingRanks(ranks=(0,), nodes=("n0",), how="missing", reason="rank 0 has not come")
STOPPED = BlockingRanks(ranks=(1,), nodes=("n0",), how="stopped", hard=True, reason="rank 1 is stopped")


@pytest.mark.parametrize(
    ("named", "times", "told"),
    [
        (
            LATE,
            (5.0, 6.2),
            "no rank stands out: the job is within a step: steps take 5.0 s, and the newest was made 6.2 s",
        ),
        (LATE, (5.0, 9.0), "rank 0 on n0 (missing): rank 0 has not come"),
        (LATE, (0.0, 0.1), "rank 0 on n0 (missing): rank 0 has not come"),
        (STOPPED, (5.0, 1.0), "rank 1 on n0 (stopped, for certain): rank 1 is stopped"),
    ],
)
def test_who_is_last_within_a_usual_step_is_not_accused(
    named: BlockingRanks,
    times: tuple[float, float],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = msgspec.structs.replace(look_of(named, r0="S", r1="S"), usual_step_s=times[0], since_step_s=times[1])
    monkeypatch.setattr("holdfast.cli.run_dirs.run_selection.run_to_read", lambda args: None)
    monkeypatch.setattr(trace_command, "_ask_trace", lambda run_dir, args: seen)
    monkeypatch.setattr(trace_command, "_read_step", lambda run_dir: 5)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert main(["trace"]) == 0
    assert capsys.readouterr().out.startswith(told)


def test_without_a_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    assert main(["trace"]) == 2
    assert run_directory.NO_RUN in capsys.readouterr().err
    assert main(["trace", "--rounds", "0"]) == 2
    assert "--rounds " in capsys.readouterr().err


def test_a_job_without_ranks_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("holdfast.cli.run_dirs.run_selection.run_to_read", lambda args: None)
    monkeypatch.setattr(trace_command, "_ask_trace", lambda run_dir, args: look_of(BlockingRanks(reason="no stacks")))
    monkeypatch.setattr(trace_command, "ask_controller", lambda run_dir, path: {"phase": "waiting"})
    assert main(["trace"]) == 1
    assert capsys.readouterr().err == "holdfast trace: no rank runs now; the job is waiting\n"


def test_nodes_that_do_not_answer_are_no_job_without_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = Trace(node="n0", at=0.0, error="no answer within 5 s")
    found = JobStacks(at=0.0, naming=BlockingRanks(reason="no stacks"), traces=(late,))
    monkeypatch.setattr("holdfast.cli.run_dirs.run_selection.run_to_read", lambda args: None)
    monkeypatch.setattr(trace_command, "_ask_trace", lambda run_dir, args: found)
    assert main(["trace"]) == 0
    assert_screens("trace", {"a node does not answer": capsys.readouterr().out})


def test_long_paths_are_whole_and_endless_ones_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "site-packages/" + "a_package_with_a_long_name/" * 8 + "module.py"
    ranks = [
        Process(node="n0", rank=0, pid=1, threads=(Thread(main=True, frames=(Frame("run", path),)),)),
        Process(node="n0", rank=1, pid=2, threads=(Thread(main=True, frames=(Frame("f" * 9000, "x.py"),)),)),
    ]
    found = JobStacks(at=0.0, naming=LATE, traces=(Trace(node="n0", at=0.0, processes=tuple(ranks)),))
    monkeypatch.setattr("holdfast.cli.run_dirs.run_selection.run_to_read", lambda args: None)
    monkeypatch.setattr(trace_command, "_ask_trace", lambda run_dir, args: found)
    assert main(["trace", "--rounds", "2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.endswith(f"rank 0: run ({path})") for line in shown)
    [endless] = [line for line in shown if "rank 1: f" in line]
    assert endless.endswith("f ...") and len(endless) < 1100


@pytest.mark.parametrize(
    ("looks", "flags", "told"),
    [
        # The others still made a step after the first look: the second one knows who keeps them from more.
        ([look_of(LATE, r0="S", r1="S"), look_of(STOPPED, r0="S", r1="T")], [], "rank 1 is stopped"),
        ([look_of(LATE, r0="S", r1="S"), look_of(LATE, r0="S", r1="S")], [], "--rounds 10"),
        ([look_of(BlockingRanks(reason="every rank is stopped"), r0="T")], [], "rank 0 is stopped, and no rank runs"),
        (
            [look_of(LATE, r0="S"), look_of(LATE, r0="S"), look_of(STOPPED, r0="S", r1="T")],
            ["--rounds", "3"],
            "rank 1 is stopped",
        ),
    ],
)
def test_a_stopped_process_is_told_at_once(
    looks: list[JobStacks],
    flags: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers, steps = iter(looks), iter((5, 7))
    monkeypatch.setattr("holdfast.cli.run_dirs.run_selection.run_to_read", lambda args: None)
    monkeypatch.setattr(trace_command, "_ask_trace", lambda run_dir, args: next(answers))
    monkeypatch.setattr(trace_command, "_read_step", lambda run_dir: next(steps))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert main(["trace", *flags]) == 0
    assert told in capsys.readouterr().out.splitlines()[0]
