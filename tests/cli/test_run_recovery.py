"""A job heals: a rank killed, a node lost, survivors that will not go; and what the record says of it."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from holdfast.cli import main
from holdfast.core.detect.job_progress import LEAD
from tests.cli.conftest import Start
from tests.cli.console_transcript import assert_transcript
from tests.cli.driver import TRAIN, Job, gone

pytestmark = pytest.mark.e2e


def test_a_killed_rank_is_restarted_in_place(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2")
    before = min(node["step"] for node in job.trains()["nodes"])  # these nodes do not wait for each other
    first = job.ranks(4)
    job.kill(first[2])
    after = job.trains(generation=2)["step"]
    assert gone(*first)
    job.finish()
    job.ends(0)

    assert main(["report", "--json", str(job.run_dir)]) == 0
    incident = json.loads(capsys.readouterr().out)["incidents"]
    assert len(incident) == 1
    [record] = incident
    assert (record["ranks"], record["suspects"], record["generation"]) == ([2], ["n1"], 1)
    assert record["verdict"]["remedy"] == "restart"
    assert record["evicted"] == record["admitted"] == []
    assert before <= record["good_step"] <= after
    assert record["resumed_from"] is not None and record["resumed_from"] <= after
    times = [record[f"{what}_at"] for what in ("good", "alarm", "stopped", "launched", "resumed")]
    assert times == sorted(times)
    job.report()  # its spans tile the wall clock
    assert_transcript(job, "crash")
    assert job.check_replay() > 5


@pytest.mark.slow
def test_a_stage_that_tells_of_no_steps_hides_no_progress(start: Start) -> None:
    """As the first stage of a pipeline that has no optimizer."""
    job = start(
        "--nnodes", "2", "--nproc-per-node", "1", script=TRAIN.replace("holdfast.step", "rank == '0' or holdfast.step")
    )
    before = job.trains()["step"]
    job.kill(job.rank(1))
    job.trains(generation=2)
    assert re.search(r" step \d+; rank 0 ", (now := job.status()["now"])), now
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.ranks, record.failures) == ((1,), 1) and LEAD <= before <= record.good_step
    assert record.resumed_from is not None and record.resumed_from <= record.good_step + 1
    assert not any("no step" in line or "without a step" in line for line in job.sentences()), job.text()


UNEVEN = """
import os, sys
import torch, torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1, 9 if rank == 1 else 20):
    dist.all_reduce(torch.ones(1))
    holdfast.step(step)
END
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os._exit(0)", "pass"], ids=["at once", "in its own time"])
def test_a_rank_that_leaves_early_is_the_cause_and_the_script_is_to_blame(start: Start, end: str) -> None:
    """The others say no more than that a connection was closed, which they see before its process is gone."""
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=UNEVEN.replace("END", end))
    job.ends(93)
    first = job.report().incidents[0]
    assert (first.ranks, first.evicted) == ((1,), ())
    assert first.suspects == ("n0",) and "step 8" in first.cause
    assert any(first.cause in line for line in job.sentences()), job.text()


def seats(job: Job) -> dict[str, str]:
    return {node["ranks"]: node["node"] for node in job.status()["nodes"] if node["role"] == "active"}


def standbys(job: Job) -> list[str]:
    return [node["node"] for node in job.status().get("nodes", []) if node["role"] == "ready"]


def test_a_lost_node_is_replaced_by_a_standby(start: Start) -> None:
    job = start("--nnodes", "2", "--standbys", "1", "--set", "silence.silence_s=2")
    job.trains()
    seated, standby = seats(job), job.until(lambda: standbys(job), "a standby")
    lost, kept = job.holder(seated["0"]), job.rank(1)
    below = [lost, *(child.pid for child in psutil.Process(lost).children(recursive=True))]
    assert job.rank(0) in below
    job.kill(lost)
    job.trains(generation=2)
    assert gone(*below, kept)
    assert seats(job) == {"0": standby[0], "1": seated["1"]}
    assert job.until(lambda: standbys(job), "another standby") == ["n3"]
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.evicted, record.admitted) == ("silence", (seated["0"],), (standby[0],))
    assert (job.run_dir / "nodes" / seated["0"] / "released").read_text() == "evicted\n"
    job.check_replay()


ALONE = """
import os, sys, time
import holdfast
with open(f"{sys.argv[1]}/all", "a", buffering=1) as log:
    for step in range(1, 100_000):
        time.sleep(0.02)
        log.write(f"{os.getpid()}\\n")
        holdfast.step(step, loss=1.0)
        if os.path.exists(f"{sys.argv[1]}/finish"):
            break
"""


@pytest.mark.slow
def test_of_a_single_node_that_answers_no_more_nothing_is_left_when_its_successor_starts(start: Start) -> None:
    """Its agent is stopped and its ranks train on. Nobody could end them but the fleet, which does, at once."""
    job = start("--set", "silence.silence_s=2", "--set", "node.lost_s=600", script=ALONE)
    job.trains()
    first = job.rank(0)
    job.kill(job.agent("n0"), signal.SIGSTOP)
    job.trains(generation=2)  # long before ranks without a controller would have ended themselves
    assert gone(first)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.evicted, record.admitted) == ("silence", ("n0",), ("n1",))
    trained = [int(line) for line in (job.folder / "all").read_text().split()]
    assert len(set(trained)) == 2
    assert trained == sorted(trained, key=lambda pid: pid != first)  # never both
    job.check_replay()


STUBBORN = """
import os, signal, subprocess, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
if rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == "2":
    # What a rank may leave behind: a child, one in a session of its own, and one whose parent has ended too.
    nap = ["sleep", "300"]
    children = [subprocess.Popen(nap).pid, subprocess.Popen(nap, start_new_session=True).pid]
    shell = subprocess.run(["setsid", "-f", "sh", "-c", "echo $$ > $0; sleep 300; true", f"{folder}/deep"])
    open(f"{folder}/children", "a").write("".join(f"{pid}\\n" for pid in children))
"""


def test_nothing_of_an_old_generation_stays(start: Start, tmp_path: Path) -> None:
    """Rank 0 is stopped (state T), rank 1 ignores SIGTERM, rank 2 has children that hide; rank 3 is killed."""
    job = start("--nproc-per-node", "4", "--set", "recovery.stop_grace_s=1", script=STUBBORN + TRAIN)
    job.trains()
    first = job.ranks(4)
    deep = int(job.until(lambda: (tmp_path / "deep").exists() and (tmp_path / "deep").read_text(), "a daemon"))
    left = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    left += [deep, *(child.pid for child in psutil.Process(deep).children())]
    assert len(left) == 4 and not any(gone(pid) for pid in left)
    job.kill(first[0], signal.SIGSTOP)
    job.kill(first[3])
    job.trains(generation=2)
    assert gone(*first, *left)
    again = job.until(lambda: [int(pid) for pid in (tmp_path / "children").read_text().split()][2:], "its children")
    assert len(again) == 2 and not any(gone(pid) for pid in again)
    job.finish()
    job.ends(0)
    assert gone(*again)
    [record] = job.report().incidents
    assert record.ranks == (3,) and record.evicted == ()
    assert record.stopped_at - record.alarm_at < 10


@pytest.mark.slow
def test_a_stopped_rank_is_not_waited_for(start: Start) -> None:
    job = start("--nproc-per-node", "2", "--set", "recovery.stop_grace_s=30")
    job.trains()
    job.kill(job.rank(0), signal.SIGSTOP)
    job.kill(job.rank(1))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert record.stopped_at - record.alarm_at < 15  # half of the grace, and far more than it takes


@pytest.mark.slow
def test_survivors_that_wait_for_ever_are_ended(start: Start, tmp_path: Path) -> None:
    """As in a collective whose peer is gone: a call that returns on no signal."""
    deaf = """
    if step == 6 and rank == "0" and os.environ["HOLDFAST_GENERATION"] == "1":
        import ctypes, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.CDLL(None).sleep(300)
"""
    job = start("--nproc-per-node", "2", "--set", "recovery.stop_grace_s=0.5", script=TRAIN + deaf)
    job.trains()
    job.until(lambda: (tmp_path / "step-0").read_text() == "6", "the step at which rank 0 falls asleep")
    job.kill(job.rank(1))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    assert len(job.report().incidents) == 1
