"""A job in which all processes wait for their GPUs and one GPU stands, by what a recorder of NCCL would say."""

import re

import pytest

from tests.cli.conftest import Start
from tests.cli.rungs import node_of

pytestmark = pytest.mark.e2e

# Torch is played, its recorder's dumps are in torch's format. After the strike every process waits for its GPU.
TRAIN = """
import os, pickle, sys, time, types
dist = sys.modules.setdefault("torch.distributed", types.ModuleType("torch.distributed"))
c10d = sys.modules.setdefault("torch._C._distributed_c10d", types.ModuleType("torch._C._distributed_c10d"))
folder, rank, generation = sys.argv[1], int(os.environ["RANK"]), os.environ["HOLDFAST_GENERATION"]
assert os.environ["TORCH_NCCL_ENABLE_TIMING"] == "1"
struck_at = 0.0

def entry(seq, state, at):
    made = {"record_id": seq, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq}
    made |= {"p2p_seq_id": 0, "profiling_name": "nccl:all_reduce", "time_created_ns": int(at * 1e9), "is_p2p": False}
    made |= {"state": state, "retired": state == "completed", "timeout_ms": 600_000}
    made |= {"time_discovered_started_ns": None if state == "scheduled" else int(at * 1e9)}
    made |= {"time_discovered_completed_ns": int(at * 1e9) + 10_000_000 if state == "completed" else None}
    return made | ({"duration_ms": 5.0} if state == "completed" else {})

def dump(*_):
    entries = [entry(40, "completed", struck_at or time.time())]
    if struck_at:
        entries.append(entry(41, "scheduled" if rank == 2 else "started", struck_at))
    return pickle.dumps({"entries": entries, "pg_status": {}})

dist.is_initialized, c10d._dump_nccl_trace = (lambda: True), dump
import holdfast

def wait_for_gpu():
    time.sleep(1000)

step = 0
while not os.path.exists(f"{folder}/finish"):
    time.sleep(0.05)
    step += 1
    holdfast.step(step)
    if generation == "1" and os.path.exists(f"{folder}/strike"):
        struck_at = time.time()
        wait_for_gpu()
"""


def test_the_node_of_a_gpu_that_stands_is_replaced_within_seconds(start: Start) -> None:
    job = start("--nnodes", "4", "--nproc-per-node", "1", "--standbys", "1", script=TRAIN)
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    job.until(lambda: "ready" in [node["role"] for node in job.status()["nodes"]], "a standby", patience_s=100)
    bad = node_of(job, 2)
    (job.folder / "strike").touch()
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert (record.kind, record.ranks, record.evicted) == ("hang", (2,), (bad,))
    assert re.search(r"\brank 2's GPU .* all_reduce 41 of group 0, ", record.cause), record
