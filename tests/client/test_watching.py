"""The numbers of an optimizer's step: as its own state has them, and only where there is such state."""

import mmap
from pathlib import Path

import pytest
import torch

from holdfast.client.progress import Progress
from holdfast.client.watching import Watching
from holdfast.model.signal import Values
from holdfast.wire.slot import read, told
from tests.client.conftest import Zygote


def trained(optimizer: type[torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer, Watching]:
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    made = optimizer(net.parameters(), lr=0.1)  # type: ignore[call-arg]
    watching = Watching(made)
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
    progress, net = Progress(), torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    progress.watch(optimizer)
    net(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    progress.step(1, loss=0.5)
    progress.step(2, loss=0.5, grad_norm=7.0)
    now = read(arena[1], 2)
    assert now
    first, second = told(arena[1], 2, now, 0)[1]
    assert isinstance(first, Values) and first.update and first.grad_norm and first.own_norm is None
    assert isinstance(second, Values) and second.grad_norm == 7.0, "what the script tells counts"


def test_what_cannot_be_watched_is_said_and_does_no_harm(
    arena: tuple[str, mmap.mmap], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_SLOT", f"{arena[0]}:2")
    progress = Progress()
    progress.watch("no optimizer")
    assert "is not watched" in capsys.readouterr().err
    progress.step(1, loss=0.5)


OWN = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from holdfast.client.layout import fix
from holdfast.client.watching import Watching

def run(watch):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    fix(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    watching = Watching(optimizer, ddp) if watch else None
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
