"""Ranks that have nothing left to do and do not end; and ranks that let children train."""

import signal

import pytest

from holdfast.model.decider_events import Ended
from holdfast.model.detector_alarm import Kind, Stance
from tests.cli.conftest import Start
from tests.cli.driver import gone

pytestmark = pytest.mark.e2e

IMPORTS_S = 150.0  # children import torch themselves, and say nothing meanwhile
BOUND = ("--set", "hang.act_s=4", "--set", "hang.least_s=1")

STEPS = """
import os, sys, threading, time
import holdfast
rank = int(os.environ["RANK"])
for step in range(1, 6):
    time.sleep(0.05)
    holdfast.step(step)
"""

AT_EXIT = (
    STEPS
    + """
import atexit
if rank == 1:
    atexit.register(threading.Event().wait)
"""
)

JOINED = (
    STEPS
    + """
if rank == 1:
    threading.Thread(target=threading.Event().wait).start()
"""
)

BEFORE_IT = (
    STEPS
    + """
if rank == 1:
    threading.Event().wait()
"""
)

# A deadlock in the teardown: a barrier that the other rank never comes to, as it has ended.
IN_DESTROY = """
import os, sys, threading
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
import holdfast
dist.init_process_group("gloo")
for step in range(1, 6):
    dist.all_reduce(torch.ones(1))
    holdfast.step(step)
if dist.get_rank() == 1:
    c10d._unregister_all_process_groups = threading.Event().wait
dist.destroy_process_group()
"""

SAVES = """
import os, sys, time
import torch, torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
for step in range(1, 6):
    dist.all_reduce(torch.ones(1))
    holdfast.step(step)
print("last step at", time.time(), flush=True)
dist.destroy_process_group()
while not os.path.exists(os.path.join(sys.argv[1], "finish")):
    time.sleep(0.05)
"""

SPAWNS = """
import os, sys, time
import torch, torch.distributed as dist
import torch.multiprocessing as mp

def train(local, folder):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    while True:
        time.sleep(0.05)
        weight.grad = torch.ones(1)
        dist.all_reduce(weight.grad)
        optimizer.step()
        stop = torch.tensor(float(os.path.exists(f"{folder}/finish")))
        dist.all_reduce(stop)
        if stop:
            break
    dist.destroy_process_group()

if __name__ == "__main__":
    folder = sys.argv[1]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        sys.exit(0)
    mp.spawn(train, (folder,), nprocs=1)
"""
SPAWNS_MANY = SPAWNS.replace(
    'rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])', "rank, world = local, 2"
).replace("nprocs=1", "nprocs=2")


def test_a_rank_that_hangs_at_exit_does_not_keep_the_job(start: Start) -> None:
    job = start(*BOUND, "--nproc-per-node", "2", script=AT_EXIT, zygote=True)
    stuck = job.rank(1)
    job.ends(0)
    assert "wait (threading.py" in job.says("rank 1 ")
    assert gone(stuck) and job.report().incidents == ()
    job.check_replay()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [("--nproc-per-node", "2"), ("--nnodes", "2")])
def test_a_thread_that_nobody_joins_does_not_keep_the_job(start: Start, nodes: tuple[str, ...]) -> None:
    job = start("--set", "hang.act_s=14", *nodes, script=JOINED, zygote=True)
    job.ends(0)
    [named] = job.alarms(Kind.HANG)
    assert (named.ranks, named.stance) == ((1,), Stance.NOTIFY)
    [done] = [ended.reason for ended in job.events(Ended) if ended.left]
    assert done.startswith(named.reason.partition(":")[0]) and "threading.py" in done
    assert done in job.text() and job.report().incidents == ()


def test_what_a_script_does_after_it_left_its_process_group_is_not_training(start: Start) -> None:
    job = start("--nproc-per-node", "2", script=SAVES)
    job.until(lambda: job.status().get("parted"), "the end of training")
    status = job.status()
    assert status["step"] == 5
    job.until(lambda: job.status()["wall_s"] > status["wall_s"] + 2, "some seconds in which nothing is trained")
    job.finish()
    job.ends(0)
    found = job.report()
    made_at = max(float(line.split()[-1]) for line in job.text().splitlines() if "last step at" in line)
    trained = [span for span in found.spans if span.use == "train"]
    assert not trained or trained[-1].end_at <= made_at
    [end] = [span for span in found.spans if span.use == "end"]
    assert end.seconds > 2 and end.start_at <= made_at


@pytest.mark.slow
def test_a_teardown_that_hangs_does_not_keep_the_job(start: Start) -> None:
    job = start(*BOUND, "--nnodes", "2", script=IN_DESTROY)
    job.ends(0)
    assert "destroy_process_group" in job.says("rank 1 ")
    assert job.report().incidents == ()


@pytest.mark.slow
def test_a_rank_that_stands_before_its_end_is_the_scripts_trouble(start: Start) -> None:
    job = start(*BOUND, "--nnodes", "2", "--max-restarts", "0", script=BEFORE_IT, zygote=True)
    job.ends(1)
    [record] = job.report().incidents
    assert (record.kind, record.ranks, record.evicted) == ("hang", (1,), ())
    assert record.cause.startswith("rank 1 ")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_children_that_train_are_seen(start: Start) -> None:
    """Each rank lets one child train, which imports nothing of ours; one of them is stopped."""
    job = start("--nnodes", "2", "--standbys", "1", script=SPAWNS)
    job.patience_s = IMPORTS_S
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    [child] = job.children(job.rank(1))
    job.kill(child, signal.SIGSTOP)
    job.says("resumed")
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.ranks) == ("hang", (1,))
    assert str(child) in record.cause


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_rank_whose_children_train_together(start: Start) -> None:
    """The first child that steps speaks for the rank; another one that stands is named all the same."""
    job = start(script=SPAWNS_MANY)
    job.patience_s = IMPORTS_S
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    child = max(job.children(job.rank(0)))
    job.kill(child, signal.SIGSTOP)
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.ranks) == ("hang", (0,))
    assert str(child) in record.cause
