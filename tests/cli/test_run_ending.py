"""How jobs end: by themselves, by a failure, by a person; with which code, and with everybody gone."""

import signal
import time
from pathlib import Path

import pytest
import torch

from holdfast.cli import main
from holdfast.cli.run_dirs import run_directory
from tests.cli.conftest import Start
from tests.cli.console_transcript import assert_transcript
from tests.cli.driver import CLEAN, DEAF, TRAIN, gone

pytestmark = pytest.mark.e2e

FAILURES = {
    "its own code": (
        "import sys; print('my batch is broken'); sys.exit(3)",
        ("--max-restarts", "0"),
        3,
        '(SystemExit: 3; last said: "my batch is broken"); --max-restarts 0 used up',
    ),
    "a signal": ("import os; os.kill(os.getpid(), 11)", ("--max-restarts", "0"), 139, "was killed by SIGSEGV"),
    "before the first step": ("import no_such_thing", (), 93, "before any step was seen"),
    "a path that can never be written": (
        "import torch, holdfast; holdfast.Checkpointer(model=torch.nn.Linear(1, 1), path='/proc/nope')",
        (),
        93,
        "cannot write checkpoints: /proc/nope cannot be written: ",
    ),
    "one of two": (
        "import os, sys; sys.exit(int(os.environ['RANK']))",
        ("--nnodes", "2", "--max-restarts", "0"),
        1,
        "rank 1 on n1 exited with code 1",
    ),
}


SELDOM = ("its own code", "one of two")


@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=pytest.mark.slow) if one in SELDOM else one for one in FAILURES]
)
def test_a_failure_gives_its_code(start: Start, what: str) -> None:
    script, flags, code, words = FAILURES[what]
    job = start(*flags, script=script)
    job.ends(code)
    said = job.sentences()
    assert any(line.startswith("holdfast: ending: ") and words in line for line in said), job.text()
    assert job.report().code == code
    [record] = job.report().incidents
    assert record.verdict.remedy == "give up"
    assert "Traceback" not in "\n".join(said)
    job.check_replay()


@pytest.mark.parametrize("zygote", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["executed", "forked"])
def test_a_script_that_ends_itself_before_its_first_step_is_not_tried_again(start: Start, zygote: bool) -> None:
    script = "import os, sys; sys.exit(3 * int(os.environ['RANK']))"
    job = start("--nproc-per-node", "2", script=script, zygote=zygote)
    job.ends(93)
    [record] = job.report().incidents
    assert (record.failures, record.evicted) == (1, ())


RACES = """
import os
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 1:
    raise RuntimeError("the archive is not whole yet")
"""


@pytest.mark.parametrize(
    ("script", "code", "failures"),
    [pytest.param(RACES, 0, 1, marks=pytest.mark.slow), (RACES.replace("< 1", "< 9"), 93, 2)],
)
def test_an_exception_before_any_step_is_tried_once_more(start: Start, script: str, code: int, failures: int) -> None:
    """It may have been a race of ranks that start; the same again is the script's own doing."""
    job = start("--nproc-per-node", "2", script=script)
    job.ends(code)
    [record] = job.report().incidents
    assert (record.failures, record.evicted) == (failures, ())
    said = "restarted in place" if code == 0 else "the script failed the same way again before any step was seen"
    assert said in record.sentence


NO_CUDA = (
    "this torch is built for the CPU alone: install a CUDA build of torch in the job's environment, "
    "or do not ask for CUDA"
)
NO_NCCL = (
    "this torch is built without NCCL: install a CUDA build of torch in the job's environment, or use the gloo backend"
)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for GPUs")
@pytest.mark.parametrize(
    ("line", "mend"),
    [
        ("torch.ones(1).cuda()", NO_CUDA),
        pytest.param('torch.distributed.init_process_group("nccl")', NO_NCCL, marks=pytest.mark.slow),
        pytest.param("torch.cuda.Event()", NO_CUDA, marks=pytest.mark.slow),
    ],
)
def test_a_torch_without_cuda_that_is_asked_for_it_is_not_tried_again(start: Start, line: str, mend: str) -> None:
    job = start("--nproc-per-node", "2", script=f"import torch\n{line}")
    job.ends(93)
    [record] = job.report().incidents
    assert (record.failures, record.evicted, record.verdict.remedy) == (1, (), "give up"), job.text()
    again = "the script failed before any step was seen; a restart would fail the same way"
    assert record.verdict.reason == f"{again}; {mend}"
    assert [line.startswith("holdfast: ending: ") for line in job.sentences() if line.endswith(mend)] == [True]


@pytest.mark.slow
def test_one_rank_that_always_fails_ends_in_giving_up(start: Start) -> None:
    """Nobody is evicted for it, and the same code twice is enough."""
    script = "import os; os._exit(3 * int(os.environ['RANK']))"
    job = start("--nnodes", "2", "--standbys", "1", "--nproc-per-node", "1", script=script)
    job.ends(93)
    [record] = job.report().incidents
    assert (record.failures, record.evicted) == (2, ())


RAISES = (
    TRAIN
    + """
    if step == 15 and rank == "1":
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x64 and 32x64)")
    if step >= 40:
        break
"""
)


def test_an_exception_after_steps_restarts_and_goes_on(start: Start) -> None:
    job = start("--nproc-per-node", "2", script=RAISES)  # its step was kept before it raised
    job.ends(0)
    [record] = job.report().incidents
    assert record.klass == "shape_dtype_device"
    assert "RuntimeError: mat1 and mat2" in record.cause
    assert record.ranks == (1,)


def test_the_same_exception_without_getting_further_ends_the_job(start: Start) -> None:
    job = start("--nproc-per-node", "2", script=RAISES.replace("step += 1\n", "step += 1\n    step = min(step, 15)\n"))
    job.ends(93)
    # One incident of two failures, if it raised before its step was seen.
    assert sum(record.failures for record in job.report().incidents) == 2


@pytest.mark.slow
def test_one_step_more_each_time_is_no_progress(start: Start) -> None:
    """Each launch makes one step and raises; such a job would be restarted for ever if every step counted."""
    job = start("--nproc-per-node", "1", script=TRAIN + "    time.sleep(0.2)\n    raise ValueError\n")
    job.ends(93)
    assert sum(record.failures for record in job.report().incidents) == 4  # recovery.attempts, and one that ends it
    job.check_replay()


def test_ctrl_c_ends_everything_once(start: Start, tmp_path: Path) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", "--standbys", "1", script=CLEAN)
    job.trains()
    job.says("first step")  # the transcript has this before the stop
    pids = [*job.ranks(2), job.holder("n0"), job.holder("n1"), job.holder("n2"), job.controller()]
    job.interrupt()
    job.ends(130)
    assert gone(*pids)
    assert (tmp_path / "clean-0-15").exists() and (tmp_path / "clean-1-15").exists()
    assert_transcript(job, "stop")
    assert job.report().incidents == ()
    assert job.report().code == 130


@pytest.mark.slow
def test_twice_ends_it_at_once(start: Start) -> None:
    job = start("--nproc-per-node", "2", "--shutdown-timeout", "100", script=DEAF)
    job.trains()
    pids = job.ranks(2)
    job.interrupt()
    job.until(lambda: job.phase() == "ending", "the end to begin")
    began_at = time.monotonic()
    job.interrupt()
    job.ends(130)
    assert time.monotonic() - began_at < 30  # far less than the grace
    assert gone(*pids)


def test_three_times_needs_no_controller(start: Start) -> None:
    job = start("--shutdown-timeout", "100", script=DEAF)
    job.trains()
    pids = [job.rank(0), job.holder("n0"), job.controller()]
    job.kill(job.controller(), signal.SIGSTOP)
    for _ in range(3):
        job.interrupt()
        time.sleep(0.2)  # or they would be one signal
    job.ends(130)
    assert gone(*pids)


def test_ctrl_c_at_any_moment_of_the_start(start: Start) -> None:
    """Also before there is anybody to pass it on to."""
    job = start()
    job.until(job.text, "its first words")
    job.interrupt()
    job.ends(130)
    assert "Traceback" not in job.text()


@pytest.mark.slow
def test_sigterm(start: Start, tmp_path: Path) -> None:
    job = start(script=CLEAN)
    job.trains()
    job.process.send_signal(signal.SIGTERM)
    job.ends(143)
    assert (tmp_path / "clean-0-15").exists()


def test_holdfast_stop(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = start(script=CLEAN)
    job.trains()
    assert main(["stop"]) == 0  # the newest run
    out, err = capsys.readouterr()
    assert out == "stopped\n" and err.startswith("holdfast: ending: stopped by "), "and what the job says meanwhile"
    job.ends(143)
    assert (tmp_path / "clean-0-15").exists()
    assert any(f"stopped by {run_directory.user_name()}" in line for line in job.sentences())
    for command in ("stop", "status"):
        assert main([command, str(job.run_dir)]) == (2 if command == "stop" else 1)
        said, how = capsys.readouterr().err, {"stop": ", ", "status": ": stopped by "}[command]
        assert said.startswith(f"holdfast {command}: ") and f"{job.run_dir} " in said and f"code 143{how}" in said
        assert said.count("\n") == 1


def test_holdfast_stop_now_hastens_one_that_stops_already(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start("--shutdown-timeout", "100", script=DEAF)
    job.trains()
    assert main(["stop", "--no-wait", str(job.run_dir)]) == 0
    job.until(lambda: job.phase() == "ending", "the end to begin")
    began_at = time.monotonic()
    assert main(["stop", "--now", str(job.run_dir)]) == 0
    assert capsys.readouterr().out == "stopping\nstopped\n"
    job.ends(143)
    assert time.monotonic() - began_at < 30  # far less than the grace


def test_ctrl_c_while_nodes_are_being_started(start: Start) -> None:
    """The job's own fork server imports for seconds before the first node is there; nobody waits for it, or is left."""
    job = start("--nnodes", "3", zygote=True, OWN_SERVER="1")
    job.until(lambda: (job.run_dir / "nodes" / "n2").exists(), "a node that is to be started")
    job.interrupt()
    job.ends(130)
    assert not (job.run_dir / "fork.sock").exists()


SLOW_STEPS = """
import os, time, torch, torch.distributed as dist, holdfast
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
checkpointer = holdfast.Checkpointer(model=model, path="checkpoints", every=1000)
for step in range(checkpointer.restore() + 1, 1000):
    time.sleep(0.4)
    checkpointer.save(step)
    holdfast.step(step)
"""


@pytest.mark.slow
def test_the_newest_step_is_stored_where_nodes_hold_copies_of_each_others_states(start: Start) -> None:
    """Between two steps each node has the newest state of both ranks, and writes that of its own."""
    job = start("--nnodes", "2", "--nproc-per-node", "1", script=SLOW_STEPS)
    job.until(lambda: (job.status().get("step") or 0) >= 8, "steps")
    reached = job.status()["step"]
    job.process.send_signal(signal.SIGTERM)
    job.ends(143)
    [stored] = (job.folder / "checkpoints").glob("step-*")
    assert int(stored.name[5:]) >= reached


GIVES_UP = SLOW_STEPS.replace(
    "    time.sleep(0.4)\n",
    """    time.sleep(0.05)
    dist.barrier()
    if step == 15 and dist.get_rank() == 1:
        raise ValueError("the batch has no labels")
""",
)


@pytest.mark.slow
def test_the_newest_step_of_all_ranks_is_stored_when_the_job_gives_up(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "1", script=GIVES_UP)
    job.ends(93, patience_s=90)
    [record] = job.report().incidents[-1:]
    assert record.verdict.remedy == "give up", job.text()
    [stored] = (job.folder / "checkpoints").glob("step-*")
    assert stored.name == "step-00000014", "all that both ranks had made, though the next checkpoint was far away"
