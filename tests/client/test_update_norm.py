"""The numbers of an optimizer's step: as its own state has them, and only where there is such state."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from holdfast.client.training.progress import RankProgress
from holdfast.client.training.update_norm import UpdateWatch
from holdfast.model.observation import StepValues
from holdfast.wire.rank_memory.slot_reader import read_entries, read_slot
from tests.client.conftest import Zygote
from tests.client.one_rank_group import one_rank_group


def trained(optimizer: type[torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer, UpdateWatch]:
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    made = optimizer(net.parameters(), lr=0.1)  # type: ignore[call-arg]
    watching = UpdateWatch(made)
    for _ in range(3):
        made.zero_grad()
        net(torch.randn(4, 5)).square().mean().backward()
        made.step()
    return net, made, watching


def test_the_largest_step_of_any_tensor_is_told() -> None:
    net, optimizer, watching = trained(torch.optim.AdamW)
    states = [optimizer.state[p] for p in net.parameters()]
    steps = [0.1 * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8) for state in states]
    largest = max(float(step.square().mean().sqrt()) for step in steps)
    norm = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
    assert watching.update is not None and watching.norm is not None
    torch.testing.assert_close(watching.update, torch.tensor(largest))
    torch.testing.assert_close(watching.norm, norm)
    assert watching.own_norm is None


def test_watching_changes_nothing() -> None:
    net, _, _ = trained(torch.optim.AdamW)
    torch.manual_seed(0)
    other = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        other(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_an_optimizer_without_moments_tells_the_norm_alone() -> None:
    _, _, watching = trained(torch.optim.SGD)
    assert watching.update is None and watching.norm is not None


def test_a_watched_optimizer_is_told_with_the_step(
    arena: tuple[str, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SLOT", f"{arena[0]}:2")
    progress, net = RankProgress(), torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    progress.watch(optimizer)
    net(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    progress.step(1, loss=0.5)
    progress.step(2, loss=0.5, grad_norm=7.0)
    now = read_slot(arena[1], 2)
    assert now
    first, second = read_entries(arena[1], 2, now, 0)[1]
    assert isinstance(first, StepValues) and first.update and first.grad_norm and first.own_norm is None
    assert isinstance(second, StepValues) and second.grad_norm == 7.0, "what the script tells counts"


def test_what_cannot_be_watched_is_said_and_does_no_harm(
    arena: tuple[str, mmap.mmap], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_SLOT", f"{arena[0]}:2")
    progress = RankProgress()
    progress.watch("no optimizer")
    assert capsys.readouterr().err.startswith("holdfast: ")
    progress.step(1, loss=0.5)


OWN = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from holdfast.client.training.fixed_ddp_buckets import fix_buckets
from holdfast.client.training.update_norm import UpdateWatch

def run(watch):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    fix_buckets(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    watching = UpdateWatch(optimizer, ddp) if watch else None
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        loss = ddp(torch.randn(2, 4)).square().mean()
        own = torch.autograd.grad(loss, list(ddp.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()
        if watching:
            torch.testing.assert_close(watching.own_norm, torch.cat([g.flatten() for g in own]).norm())
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
assert torch.equal(run(False), run(True)), "the sums are other ones"
os._exit(0)
"""


def test_the_own_gradient_is_seen_before_the_sum_which_stays_the_same(warm: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN)
    ranks = [warm.fork(str(script), str(tmp_path / "store"), str(rank)) for rank in range(2)]
    ended = [warm.wait(rank) for rank in ranks]
    assert [one.code for one in ended] == [0, 0], ended


def norm_of(*nets: torch.nn.Module) -> torch.Tensor:
    grads = [p.grad.flatten() for net in nets for p in net.parameters() if p.grad is not None]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(grads))
    return norm


def test_the_norm_is_the_one_before_clipping() -> None:
    clip = torch.nn.utils.clip_grad_norm_  # as a script has it that imported the name before it watches
    net = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    watching = UpdateWatch(optimizer)
    for scale in (1000.0, 10.0):
        optimizer.zero_grad()
        (scale * net(torch.ones(4, 5)).sum()).backward()
        before = norm_of(net)
        torch.testing.assert_close(clip(net.parameters(), 1.0), before)
        optimizer.step()
        assert watching.norm is not None and norm_of(net) < 1.1
        torch.testing.assert_close(watching.norm, before)


def test_parts_that_are_clipped_apart_or_not_at_all_make_one_norm() -> None:
    nets = [torch.nn.Linear(5, 3) for _ in range(3)]
    stranger = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
    watching = UpdateWatch(optimizer)
    for net in (*nets, stranger):
        (100 * net(torch.ones(4, 5)).sum()).backward()
    before = norm_of(*nets)
    for net in (*nets[:2], stranger):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    assert watching.norm is not None
    torch.testing.assert_close(watching.norm, before)


def test_what_was_clipped_for_a_step_that_was_not_made_counts_for_none() -> None:
    """A gradient scaler leaves a step out whose gradients are not finite."""
    net = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watching = UpdateWatch(optimizer)
    before = torch.zeros(())
    for scale in (torch.inf, 10.0):
        optimizer.zero_grad()
        (scale * net(torch.ones(4, 5)).sum()).backward()
        before = norm_of(net)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    assert watching.norm is not None
    torch.testing.assert_close(watching.norm, before)


def test_clipping_may_still_be_compiled_whole() -> None:
    net = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watching = UpdateWatch(optimizer)
    net(torch.ones(4, 5)).sum().backward()
    parameters = list(net.parameters())
    torch.compile(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0), backend="eager", fullgraph=True)()
    optimizer.step()
    assert watching.norm is not None


class Odd(torch.optim.SGD):
    """Keeps something else than moments under their names."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg_sq"] = self.state[parameter]["exp_avg"] = "none"
        return super().step(closure)


def test_no_trouble_of_ours_reaches_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    net = torch.nn.Linear(5, 3)
    optimizer = Odd(net.parameters(), lr=0.1)
    watching = UpdateWatch(optimizer)
    for _ in range(2):
        net(torch.ones(4, 5)).sum().backward()
        optimizer.step()
    assert watching.update is None and watching.norm is None
    assert capsys.readouterr().err.count("holdfast: ") == 1


SHARDED = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from holdfast.client.training.update_norm import UpdateWatch

def made(how):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, bias=False))
    if how == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    if how == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    if how == "tp":
        parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return net

def alone(how):
    net = made(how)  # a rank that watches by itself is not waited for, and waits for nobody
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    watching = UpdateWatch(optimizer) if dist.get_rank() == 0 else None
    for _ in range(2):
        net(torch.ones(2, 4)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

def run(how, clip):
    net = made(how)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    watching = UpdateWatch(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        (1000 * net(torch.ones(2, 4)).square().mean()).backward()
        if clip:
            told = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    if clip:
        told = told.full_tensor() if hasattr(told, "full_tensor") else told
        torch.testing.assert_close(watching.norm, told)
    assert type(watching.norm) is type(watching.update) is torch.Tensor, (how, watching.norm, watching.update)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return watching.norm, watching.update, torch.cat([w.detach().flatten() for w in weights])

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
for how in ("fsdp", "hsdp", "tp"):
    alone(how)
norm, update, weights = run("", True)
for how in ("fsdp", "hsdp", "tp"):
    other = run(how, True)
    torch.testing.assert_close(other[0], norm, msg=how)
    torch.testing.assert_close(other[2], weights)
    assert update * 0.7 < other[1] < update * 1.5, (how, other[1], update)
    run(how, False)
if int(sys.argv[2]) == 0:
    print("watched", flush=True)
os._exit(0)
"""


def test_sharded_and_tensor_parallel_models_are_watched(warm: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    ranks = [warm.fork(str(script), str(tmp_path / "store"), str(rank)) for rank in range(2)]
    ended = [warm.wait(rank) for rank in ranks]
    assert [one.code for one in ended] == [0, 0], ended
    assert "watched" in ended[0].out
    assert "holdfast: " not in ended[0].err + ended[1].err


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """A process group of one."""
    with one_rank_group():
        yield init_device_mesh("cpu", (1,))


def test_a_distributed_norm_is_read_where_that_asks_nobody(
    arena: tuple[str, mmap.mmap],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    alone: DeviceMesh,
) -> None:
    monkeypatch.setenv("HOLDFAST_SLOT", f"{arena[0]}:2")
    progress = RankProgress()
    progress.step(1, loss=0.5, grad_norm=DTensor.from_local(torch.tensor(3.0), alone, [Replicate()]))
    assert not capsys.readouterr().err
    for step in (2, 3):
        progress.step(step, loss=0.5, grad_norm=DTensor.from_local(torch.tensor(4.0), alone, [Partial()]))
    said = capsys.readouterr().err
    assert said.count("grad_norm of step 2") == 1 and "full_tensor()" in said
    now = read_slot(arena[1], 2)
    assert now
    norms = [one.grad_norm for one in read_entries(arena[1], 2, now, 0)[1] if isinstance(one, StepValues)]
    assert norms == [3.0, None, None]
