"""Jobs whose state is divided among ranks: a node is lost for good, and the others go on with what memory holds.

The state that more ranks saved is cut anew for fewer of them, and back again when a node comes. Losses and weights are
those of a calm run that was divided anew at the same steps, by checkpoints on storage.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.rungs import QUICK, lose, node_of, reaches, said

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.slow]

STEPS = 40
GROWS = ("--set", "recovery.last_call_s=4")
THREE = ("--nnodes", "3", "--min-nodes", "2")

# Numbers of rows that no number of ranks divides; the batch of a step is divided among the ranks that there are.
TRAIN = f"""
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import holdfast
folder, mesh_kind = sys.argv[1], os.environ.get("HOLDFAST_KIND", "rows")
steps = int(os.environ.get("HOLDFAST_STEPS", "{STEPS}"))
gates = [int(gate) for gate in os.environ.get("HOLDFAST_GATES", "").split(",") if gate]
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
net = nn.Sequential(nn.Linear(8, 34), nn.ReLU(), nn.Linear(34, 8), nn.LayerNorm(8))
mesh = None
if mesh_kind == "copies":
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
if mesh_kind == "columns":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, both["tp"], {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
    mesh = both["dp"]
for layer in (net[0], net[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
own = dict(said="by rank %d" % rank)
stored = dict(path=os.environ["HOLDFAST_STORE"], every=1000) if "HOLDFAST_STORE" in os.environ else {{}}
ckpt = holdfast.Checkpointer(model=net, optimizer=optimizer, extra=own, **stored)
first = ckpt.restore() + 1
generation = int(os.environ.get("HOLDFAST_GENERATION", "0"))
print("from", first - 1, ckpt.restored_from, generation, rank, world, own["said"].replace(" ", "-"), flush=True)
group = world if mesh_kind != "columns" else world // 2  # ranks of one row of the mesh see the same batch
for step in range(first, steps + 1):
    while step in gates and not os.path.exists(f"{{folder}}/go-{{step}}"):
        time.sleep(0.02)
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    mine = x[(rank if group == world else rank // 2) :: group]
    optimizer.zero_grad()
    loss = (net(mine) - mine).square().mean()
    loss.backward()
    optimizer.step()
    with open(f"{{folder}}/loss-{{world}}-{{rank}}", "a") as file:
        file.write("%d %s\\n" % (step, loss.item().hex()))
    ckpt.save(step, force=bool(stored) and step == steps)
    holdfast.step(step)
    time.sleep(0.02)
ckpt.wait()
kept = [thing for own in optimizer.state.values() for thing in own.values()]
tensors = [*net.parameters(), *kept]
whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
if rank == 0:
    torch.save([one.detach() for one in whole], f"{{folder}}/weights")
dist.barrier()
dist.destroy_process_group()
"""


def calm_run(folder: Path, kind: str, legs: list[tuple[int, int]]) -> None:
    """Train without holdfast run: each leg is so many ranks, up to a step; the next one begins with its checkpoint."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    for ranks, until in legs:
        env = os.environ | {"HOLDFAST_STORE": str(folder / "store"), "HOLDFAST_STEPS": str(until)}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words = [*launch, "train.py", str(folder)]
        done = subprocess.run(
            words,
            cwd=folder,
            env=env | {"HOLDFAST_KIND": kind},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def losses(folder: Path) -> dict[tuple[str, int], str]:
    """The loss of each rank's file and step; a step that was made again has the same one."""
    found: dict[tuple[str, int], str] = {}
    for path in folder.glob("loss-*"):
        for step, loss in (line.split() for line in path.read_text().splitlines()):
            assert found.setdefault((path.name, int(step)), loss) == loss
    return found


def check_like_calm(job: Job, folder: Path, kind: str, legs: list[tuple[int, int]]) -> None:
    """The job has made the very losses and weights of a calm run that was divided anew at the same steps."""
    calm_run(folder, kind, legs)
    ours, theirs = losses(job.folder), losses(folder)
    assert theirs.items() <= ours.items(), "what was made and lost again is the job's alone"
    pairs = list(zip(torch.load(job.folder / "weights"), torch.load(folder / "weights"), strict=True))
    assert len(pairs) > 10 and all(torch.equal(a, b) for a, b in pairs)


def restored(job: Job, generation: int) -> list[list[str]]:
    return sorted(words for words in said(job, "from") if words[2] == str(generation))


def test_a_lost_node_s_state_is_cut_anew_from_memory_and_back_without_any_storage(start: Start, tmp_path: Path) -> None:
    job = start(*THREE, *QUICK, *GROWS, script=TRAIN, HOLDFAST_GATES="20,30")
    reaches(job, 19)
    lose(job, node_of(job, 1))
    job.until(lambda: job.status()["generation"] > 1, "a launch without the lost node")
    (job.folder / "go-20").touch()
    reaches(job, 29, generation=3)
    (job.folder / "go-30").touch()
    job.ends(0)
    [record], [change] = job.report().incidents, job.report().changes
    shrunk, grown = record.resumed_from or 0, change.resumed_from or 0
    assert 0 < shrunk <= 19 and grown == 29
    for step, ranks in ((shrunk, 3), (grown, 2)):
        assert job.text().count(f"resuming from step {step} in memory, which {ranks} ranks have saved, cut anew") == 1
    two, three = restored(job, 2), restored(job, 3)
    assert [(words[0], words[4]) for words in two] == [(str(shrunk), "2")] * 2
    assert [(words[0], words[4]) for words in three] == [(str(grown), "3")] * 3
    assert {words[1] for words in two + three} <= {"memory", "peer"}
    assert {words[5] for words in two + three} == {"by-rank-0"}, "extras are those of rank 0, as from storage"
    check_like_calm(job, tmp_path / "calm", "rows", [(3, shrunk), (2, grown), (3, STEPS)])
    job.check_replay()


@pytest.mark.parametrize("kind", ["copies", "columns"])
def test_meshes_of_two_dimensions_are_cut_anew_though_there_is_storage(start: Start, tmp_path: Path, kind: str) -> None:
    store = tmp_path / "stored"
    flags = ("--nnodes", "2", "--min-nodes", "1", "--nproc-per-node", "2", *QUICK)
    job = start(*flags, script=TRAIN, HOLDFAST_GATES="20", HOLDFAST_KIND=kind, HOLDFAST_STORE=str(store))
    job.patience_s = 400.0  # four ranks import what builds a mesh, perhaps at once
    reaches(job, 19)
    [lost] = [view["node"] for view in job.status()["nodes"] if view["ranks"] == "2-3"]
    lose(job, lost)
    job.until(lambda: job.status()["generation"] > 1, "a launch without the lost node")
    (job.folder / "go-20").touch()
    job.ends(0)
    [record] = job.report().incidents
    step = record.resumed_from or 0
    assert 0 < step <= 19
    assert [words[1] for words in restored(job, 2)] == ["memory"] * 2, "the lost node's peer is all that is left"
    check_like_calm(job, tmp_path / "calm", kind, [(4, step), (2, STEPS)])


# Each rank has a table of its own, and all call it by the same name: nobody knows which ranks' are to be left out.
APART = """
import os, sys, time
import torch, torch.distributed as dist
import holdfast
folder = sys.argv[1]
dist.init_process_group("gloo")
table = torch.full((5,), float(dist.get_rank()))
ckpt = holdfast.Checkpointer(state_dict={"table": table}, path=os.environ["HOLDFAST_STORE"], every=5)
first = ckpt.restore() + 1
print("from", first - 1, ckpt.restored_from, os.environ["HOLDFAST_GENERATION"], flush=True)
for step in range(first, 31):
    while step == 20 and not os.path.exists(f"{folder}/go-20"):
        time.sleep(0.02)
    dist.barrier()
    table += 1
    ckpt.save(step)
    holdfast.step(step)
    time.sleep(0.1)
"""


def test_what_cannot_be_cut_is_told_and_storage_is_used(start: Start, tmp_path: Path) -> None:
    flags = ("--nnodes", "2", "--min-nodes", "1", *QUICK)
    job = start(*flags, script=APART, HOLDFAST_STORE=str(tmp_path / "stored"))
    reaches(job, 19)
    lose(job, node_of(job, 1))
    job.until(lambda: job.status()["generation"] > 1, "a launch without the lost node")
    (job.folder / "go-20").touch()
    job.ends(0)
    [record] = job.report().incidents
    why = "several groups of ranks had different tensors named table"
    assert job.text().count(f"in memory was saved by 2 ranks and cannot be cut anew for 1: {why}") == 1
    [(step, source, _)] = restored(job, 2)
    assert source == "storage" and record.resumed_from == int(step) in (5, 10, 15)
    assert job.text().count("no snapshots are taken") == 0
    job.check_replay()
