"""Ranks that go on with the same batch when a node is lost and none can take its seat, and grow back when one comes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import GlobalBatch, Here
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.rungs import CALM, QUICK, lose, node_of, reaches, said
from tests.cli.test_report_command import shown_report

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
slow = pytest.mark.slow

SAMPLES, SIZE, MICROBATCH, STEPS = 100, 12, 2, 60
# Nodes of the local fleet are replaced in seconds: here the job is to find none, and then one.
GROWS = ("--set", "recovery.last_call_s=4")
THREE = ("--nnodes", "3", "--min-nodes", "2")

# It draws by microbatch, and its learning rate follows from the step. What it computed it tells when it has saved that.
TRAIN = f"""
import contextlib, json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
import holdfast
folder, semantics = sys.argv[1], os.environ.get("HOLDFAST_SEMANTICS", "fp_order")
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 8))
model = holdfast.attach(nn.parallel.DistributedDataParallel(net))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batch = holdfast.GlobalBatch(samples={SAMPLES}, size={SIZE}, microbatch={MICROBATCH}, seed=3)
data = torch.randn({SAMPLES}, 8, generator=torch.Generator().manual_seed(1))
gates = [int(gate) for gate in os.environ.get("HOLDFAST_GATES", "").split(",") if gate]

def die_amid(here, when):
    if os.environ.get("HOLDFAST_AMID") == when and (here.generation, here.rank) == (2, 1):
        os.kill(os.getpid(), 9)

@holdfast.survive(model=model, optimizer=optimizer, semantics=semantics)
def train(here):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer, extra={{"schedule": schedule}})
    die_amid(here, "before the restore")
    first = ckpt.restore() + 1
    die_amid(here, "after the restore")
    assert here.step == first - 1 and here.world == dist.get_world_size() and here.rank == dist.get_rank()
    print("from", first - 1, ckpt.restored_from, here.generation, here.rank, here.world, os.getpid(), flush=True)
    for step in range(first, {STEPS} + 1):
        while step in gates and not os.path.exists(f"{{folder}}/go-{{step}}"):
            time.sleep(0.02)
        mine = batch.divide(step, here)
        for part in mine:
            torch.manual_seed(part.seed)
            x = data[part.samples]
            with contextlib.nullcontext() if part.last else model.no_sync():
                ((model(x) - x).square().mean() * part.weight).backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ckpt.save(step)
        told = dict(step=step, samples=[one for part in mine for one in part.samples], world=here.world, rate=rate)
        with open(f"{{folder}}/made-{{os.getpid()}}", "a") as file:
            file.write(json.dumps(told) + "\\n")
        holdfast.step(step)
        time.sleep(0.02)

train()
if dist.get_rank() == 0:
    torch.save([parameter.detach() for parameter in model.parameters()], f"{{folder}}/weights")
dist.barrier()
dist.destroy_process_group()
"""


def made_steps(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("made-*") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def open_gate(job: Job, step: int) -> None:
    (job.folder / f"go-{step}").touch()


def apart(one: Path, other: Path) -> float:
    """By how much weights differ at most."""
    pairs = zip(torch.load(one / "weights"), torch.load(other / "weights"), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def check_samples(folder: Path, worlds: dict[int, int]) -> None:
    """Every sample was in each epoch exactly once, in the steps of a job of any size, and ranks were so many."""
    made = made_steps(folder)
    assert {one["step"]: one["world"] for one in made} == worlds
    assert Counter(one["step"] for one in made) == worlds, "each rank made each step once"
    order = [sample for step in sorted(worlds) for one in made if one["step"] == step for sample in one["samples"]]
    epochs, rest = divmod(len(order), SAMPLES)
    assert len(order) == SIZE * STEPS and Counter(Counter(order).values()) == {epochs: SAMPLES - rest, epochs + 1: rest}
    calm = GlobalBatch(samples=SAMPLES, size=SIZE, microbatch=MICROBATCH, seed=3)
    for step in worlds:
        alone = calm.divide(step, Here(rank=0, world=1, generation=1, step=0))
        mine = [sample for one in made if one["step"] == step for sample in one["samples"]]
        assert sorted(mine) == sorted(sample for part in alone for sample in part.samples)


def rates(folder: Path) -> set[tuple[int, float]]:
    return {(one["step"], one["rate"]) for one in made_steps(folder)}


@pytest.fixture(scope="module")
def calm(start_shared: Start) -> Path:
    job = start_shared(*THREE, *CALM, script=TRAIN, name="calm")
    job.ends(0)
    check_samples(job.folder, dict.fromkeys(range(1, STEPS + 1), 3))
    folder = job.folder / "calm"
    folder.mkdir()
    for path in [*job.folder.glob("made-*"), job.folder / "weights"]:
        path.rename(folder / path.name)
    return folder


def shrink_and_grow(start: Start, **env: str) -> tuple[Job, str]:
    """Run a job that loses the node of rank 1 after step 19, and gets another one after step 29."""
    job = start(*THREE, *QUICK, *GROWS, script=TRAIN, HOLDFAST_GATES="20,30", **env)
    reaches(job, 19)
    lost = node_of(job, 1)
    lose(job, lost)
    job.says("going on with 2 of 3 nodes, same batch")
    open_gate(job, 20)
    reaches(job, 29, generation=2)
    assert job.status()["now"].startswith("training on 2 of 3 nodes, same batch; every rank has made step 29")
    reaches(job, 29, generation=3)
    open_gate(job, 30)
    job.ends(0)
    return job, lost


def test_the_job_shrinks_and_grows_with_the_same_batch(start: Start, calm: Path) -> None:
    job, lost = shrink_and_grow(start)
    first, second, third = job.ranks(3), job.ranks(2, generation=2), job.ranks(3, generation=3)
    assert second == [first[0], first[2]] == third[:2], "the others go on in their processes, with other numbers"
    [record], [change] = job.report().incidents, job.report().changes
    assert (record.evicted, record.good_step, record.resumed_from) == ((lost,), 19, 19), "no step is lost"
    assert (record.kept, record.renewed, record.short) == (2, 0, "2 of 3 nodes, same batch")
    assert (change.good_step, change.resumed_from, change.kept, change.renewed, change.short) == (29, 29, 2, 1, "")
    assert record.short in shown_report(job.run_dir)
    restored = [words[:3] for words in said(job, "from")[3:]]
    assert sorted(restored) == [["19", "memory", "2"]] * 2 + [["29", "memory", "3"]] * 2 + [["29", "replica", "3"]]
    check_samples(job.folder, {step: 2 if 19 < step < 30 else 3 for step in range(1, STEPS + 1)})
    assert rates(job.folder) == rates(calm)
    assert 0.0 < apart(job.folder, calm) < 1e-5, "sums are made in another order, and of the same numbers"
    job.check_replay()


@slow
def test_the_same_worlds_give_the_same_bits(start: Start, tmp_path: Path) -> None:
    for name in ("one", "other"):
        job, _ = shrink_and_grow(start, name=name)
        (tmp_path / name).mkdir()
        (job.folder / "weights").rename(tmp_path / name / "weights")
        for path in job.folder.glob("go-*"):
            path.unlink()
        job.run_dir.rename(tmp_path / f"run-{name}")
    assert apart(tmp_path / "one", tmp_path / "other") == 0.0


@slow
@pytest.mark.parametrize("when", ["before the restore", "after the restore"])
def test_a_failure_amid_the_shrinking_loses_no_step(start: Start, calm: Path, when: str) -> None:
    job = start(*THREE, *QUICK, script=TRAIN, HOLDFAST_GATES="20", HOLDFAST_AMID=when)
    reaches(job, 19)
    lose(job, node_of(job, 1))
    job.says("going on with 2 of 3 nodes, same batch")
    open_gate(job, 20)
    job.ends(0)
    [record] = job.report().incidents
    assert (record.failures, record.good_step, record.resumed_from) == (2, 19, 19)
    check_samples(job.folder, {step: 3 if step < 20 else 2 for step in range(1, STEPS + 1)})
    assert 0.0 < apart(job.folder, calm) < 1e-5


@slow
def test_without_the_floor_it_starts_again_with_fewer_and_loses_no_step(start: Start) -> None:
    """Each rank of DDP has the whole state, so other ranks, fewer or more, restore it from memory."""
    job = start(*THREE, *QUICK, *GROWS, script=TRAIN, HOLDFAST_GATES="20,30", HOLDFAST_SEMANTICS="exact")
    reaches(job, 19)
    lose(job, node_of(job, 1))
    job.until(lambda: job.status()["generation"] > 1, "a launch without the lost node")
    open_gate(job, 20)
    reaches(job, 29, generation=3)
    open_gate(job, 30)
    job.ends(0)
    first, second, third = job.ranks(3), job.ranks(2, generation=2), job.ranks(3, generation=3)
    assert "same batch" not in job.text() and not set(first) & set(second) and not set(second) & set(third)
    [record], [change] = job.report().incidents, job.report().changes
    assert record.good_step == record.resumed_from == 19 and change.good_step == change.resumed_from
    restored = [words[:3] for words in said(job, "from")[3:]]
    then = str(change.resumed_from)
    assert sorted(restored) == [["19", "memory", "2"]] * 2 + [[then, "memory", "3"]] * 2 + [[then, "replica", "3"]]
