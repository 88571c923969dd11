"""Jobs whose ranks meet in the groups of a DeviceMesh, over gloo: the rank that stands is named, and no other one."""

import pytest

from holdfast.model.detector_alarm import Kind
from tests.cli.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Four ranks. The one that stands does so in the forward pass of a layer, between two collectives of its groups.
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import holdfast

folder, kind, WIDTH, PARTS = sys.argv[1], os.environ["HOLDFAST_KIND"], 16, 4
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

def pause():
    while os.path.exists(f"{folder}/pause-{rank}"):
        time.sleep(0.1)

class Layer(nn.Module):
    def __init__(self, pauses):
        super().__init__()
        self.up, self.down, self.pauses = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), pauses

    def forward(self, batch):
        if self.pauses:
            pause()
        return batch + self.down(torch.tanh(self.up(batch)))

layers = nn.Sequential(*(Layer(n == 1) for n in range(3)))

def make_mesh(*dims):
    return init_device_mesh("cpu", tuple(size for _, size in dims), mesh_dim_names=tuple(name for name, _ in dims))

def shard(mesh):
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)

def ring(group, seen):
    # What context parallelism does: each rank sees the parts of all others of its group, one after the other.
    peers, at, total = dist.get_process_group_ranks(group), dist.get_rank(group), seen
    part = seen.detach().contiguous()
    for _ in range(len(peers) - 1):
        got = torch.empty_like(part)
        ops = [dist.P2POp(dist.isend, part, peers[(at + 1) % len(peers)], group)]
        ops.append(dist.P2POp(dist.irecv, got, peers[(at - 1) % len(peers)], group))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        total, part = total + got, got
    return total

if kind == "fsdp2":
    shard(make_mesh(("dp", world)))
elif kind == "hsdp":
    shard(make_mesh(("replicate", 2), ("shard", world // 2)))
elif kind == "tp":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = make_mesh(("dp", 2), ("tp", world // 2))
    for layer in layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(mesh["dp"])
elif kind == "cp":
    mesh = make_mesh(("dp", 2), ("cp", world // 2))
    shard(mesh["dp"])
else:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
    layers = nn.ModuleList(Layer(n == 1) for n in range(2))
    stages = [PipelineStage(part, rank + n * world, 2 * world, torch.device("cpu")) for n, part in enumerate(layers)]
    schedule = ScheduleInterleaved1F1B(stages, PARTS, loss_fn=nn.functional.mse_loss)

optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
for step in range(1, 1_000_000):
    batch = torch.randn(2 * PARTS, WIDTH)
    optimizer.zero_grad()
    if kind != "pipeline":
        seen = layers(batch)
        seen = ring(mesh["cp"].get_group(), seen) if kind == "cp" else seen
        seen.square().mean().backward()
    elif rank == 0:
        schedule.step(batch)
    elif rank == world - 1:
        schedule.step(target=torch.zeros_like(batch))
    else:
        schedule.step()
    optimizer.step()
    ends = torch.tensor(float(os.path.exists(f"{folder}/finish")))
    dist.all_reduce(ends)
    time.sleep(0.05)
    holdfast.step(step)
    if ends:
        break
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp", "tp", "cp", "pipeline"])
def test_the_rank_that_stands_is_named(start: Start, kind: str) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=TRAIN, HOLDFAST_KIND=kind)
    job.trains()
    job.until(lambda: job.status()["step"] > 20, "some steps")
    (job.folder / "pause-2").touch()
    job.says("keeps the others waiting")
    assert {alarm.ranks for alarm in job.alarms(Kind.HANG)} == {(2,)}
    (job.folder / "pause-2").unlink()
    at = job.status()["step"]
    job.until(lambda: job.status()["step"] > at + 5, "more steps")
    job.finish()
    job.ends(0)
    assert job.report().incidents == ()
