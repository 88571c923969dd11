"""A pipeline whose stages speak only by messages, over gloo: the stage that stands is named, and not its neighbours."""

import pytest

from holdfast.model.detector_alarm import Kind
from tests.cli.conftest import Start

pytestmark = pytest.mark.e2e

# One forward and one backward pass in turn, as pipelines do; waits happen in the script's own code.
PIPELINE = """
import os, sys, time
import torch, torch.distributed as dist
import holdfast

folder, batched = sys.argv[1], os.environ["HOLDFAST_BATCHED"] == "1"
dist.init_process_group("gloo")
rank, world, parts = dist.get_rank(), dist.get_world_size(), 4
open_sends = []

def exchange(call, tensor, peer):
    if batched:
        return dist.batch_isend_irecv([dist.P2POp(call, tensor, peer)])[0]
    return call(tensor, peer)

def receive(peer):
    tensor = torch.zeros(4)
    exchange(dist.irecv, tensor, peer).wait()
    return tensor

def send(tensor, peer):
    open_sends.append(exchange(dist.isend, tensor, peer))

def forward(part):
    x = receive(rank - 1) if rank else torch.full((4,), float(os.path.exists(f"{folder}/finish")))
    while part == 2 and os.path.exists(f"{folder}/pause-{rank}"):
        time.sleep(0.1)
    if rank + 1 < world:
        send(x, rank + 1)
    return x

def backward():
    grad = receive(rank + 1) if rank + 1 < world else torch.ones(4)
    if rank:
        send(grad, rank - 1)

for step in range(1, 1_000_000):
    ahead = min(world - rank - 1, parts)
    seen = [forward(part) for part in range(ahead)]
    for part in range(ahead, parts):
        seen.append(forward(part))
        backward()
    for _ in range(ahead):
        backward()
    for work in open_sends:
        work.wait()
    open_sends.clear()
    time.sleep(0.05)
    holdfast.step(step)
    if seen[0][0]:
        break
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("batched", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_the_stage_that_stands_is_named(start: Start, batched: str) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=PIPELINE, HOLDFAST_BATCHED=batched)
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    (job.folder / "pause-2").touch()
    assert "(2 -> 1)" in job.says("keeps the others waiting")
    assert {alarm.ranks for alarm in job.alarms(Kind.HANG)} == {(2,)}
    (job.folder / "pause-2").unlink()
    at = job.status()["step"]
    job.until(lambda: job.status()["step"] > at + 5, "more steps")
    job.finish()
    job.ends(0)
    assert job.report().incidents == ()
