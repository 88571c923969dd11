"""A Checkpointer: what it restores is what was saved, bit for bit, and it never stands in the way."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.client.checkpointing.checkpointer import Checkpointer
from tests.client.fake_keeper import FakeKeeper
from tests.client.job import OPTIMIZERS, Job, same


@pytest.mark.parametrize(
    ("steps", "how"),
    [(1, "adamw"), *((5, how) for how in OPTIMIZERS)]
    + [pytest.param(1, how, marks=pytest.mark.slow) for how in OPTIMIZERS if how != "adamw"],
)
def test_from_memory(keeper: FakeKeeper, how: str, steps: int) -> None:
    first = Job(0, OPTIMIZERS[how])
    assert first.ckpt.restore() == 0
    first.train(1, steps)
    wanted = first.train(steps + 1, steps + 4, save=False).everything()
    again = Job(1, OPTIMIZERS[how])
    assert again.ckpt.restore() == steps
    assert again.ckpt.restored_from == "memory"
    assert same(again.train(steps + 1, steps + 4).everything(), wanted)


def test_a_checkpointer_changes_nothing(keeper: FakeKeeper) -> None:
    def run(saving: bool) -> dict[str, Any]:
        job = Job(0)
        if saving:
            job.ckpt.restore()
        return job.train(1, 5, save=saving).everything()

    assert same(run(True), run(False))


def test_it_is_laid_out_before_the_first_step(keeper: FakeKeeper) -> None:
    before = Job(0)
    digest = keeper.arena().layout
    before.train(1, 2)
    after = Checkpointer(model=before.model, optimizer=before.optimizers, extra=before.extra)
    assert after._snapshots and after._snapshots.layout.digest == digest == keeper.arena().layout
    assert not before.optimizers[0].state.get(before.model.unused), "nothing is made up"


def test_the_state_may_change_at_once(keeper: FakeKeeper) -> None:
    job = Job(0).train(1, 3)
    wanted = copy.deepcopy(dict(job.model.state_dict()))
    with torch.no_grad():
        for tensor in (*job.model.parameters(), *job.model.buffers()):
            tensor.zero_()
    again = Job(1)
    assert again.ckpt.restore() == 3
    assert same(dict(again.model.state_dict()), wanted)


def test_never_torn_never_stale(keeper: FakeKeeper) -> None:
    """Back-to-back saves of a state that changes right before and right after each."""
    tensor, value = torch.zeros(1000), {"v": torch.zeros(3)}
    state = {"a": tensor, "b": value, "n": 0}
    ckpt = Checkpointer(state_dict=state)
    arena = keeper.arena()
    for step in range(1, 301):
        tensor.fill_(step)
        value["v"] = torch.full((3,), float(step))  # another tensor each time
        state["n"] = step
        assert ckpt.save(step)
        tensor.fill_(-1)
        if step % 10 == 0:
            sealed = arena.list_sealed()
            assert [one.step for one in sealed] == [step, step - 1]
            other = {"a": torch.zeros(1000), "b": {"v": torch.zeros(3)}, "n": 0}
            again = Checkpointer(state_dict=other)
            assert again.restore() == step
            assert other["a"].unique().tolist() == other["b"]["v"].unique().tolist() == [step]  # type: ignore[attr-defined,index]
            assert other["n"] == step


def test_nothing_grows(keeper: FakeKeeper) -> None:
    import psutil

    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state_bytes = sum(p.nbytes for p in model.parameters()) * 3
    assert ckpt._snapshots
    assert len(ckpt._snapshots.arena.memory) < 2.05 * state_bytes + (1 << 20)
    for step in range(1, 11):
        ckpt.save(step)
    before = psutil.Process().memory_info().rss
    for step in range(11, 111):
        assert ckpt.save(step)
    assert psutil.Process().memory_info().rss - before < 4 << 20


def test_a_state_that_changes_its_form(keeper: FakeKeeper, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(0).train(1, 2)
    job.model.frozen.requires_grad_(True)
    job.model.more = nn.Parameter(torch.randn(5))
    job.optimizers[0].add_param_group({"params": [job.model.more]})
    job.train(3, 4)
    assert capfd.readouterr().err.startswith("holdfast: ")
    assert "model.more" in {item.spec.key for item in job.ckpt._snapshots.layout.items}  # type: ignore[union-attr]
    assert [sealed.step for sealed in keeper.arena().list_sealed()] == [4, 3]


def test_own_state_dict(keeper: FakeKeeper) -> None:
    def job(seed: int) -> tuple[nn.Linear, torch.optim.Optimizer, list[int], Checkpointer]:
        torch.manual_seed(seed)
        model, calls = nn.Linear(3, 3), [0]
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

        def state() -> dict[str, Any]:
            return {"net": model.state_dict(), "opt": optimizer.state_dict(), "calls": calls[0]}

        def load(loaded: dict[str, Any]) -> None:
            model.load_state_dict(loaded["net"])
            optimizer.load_state_dict(loaded["opt"])
            calls[0] = loaded["calls"]

        return model, optimizer, calls, Checkpointer(state_dict=state, load=load)

    model, optimizer, calls, ckpt = job(0)
    for step in range(1, 4):
        optimizer.step()
        calls[0] += 1
        optimizer.param_groups[0]["lr"] *= 0.5
        assert ckpt.save(step)
    model2, optimizer2, calls2, ckpt2 = job(1)
    assert ckpt2.restore() == 3
    assert same(dict(model2.state_dict()), dict(model.state_dict()))
    assert same(optimizer2.state_dict(), optimizer.state_dict())
    assert calls2 == calls == [3]


def test_an_own_state_dict_with_new_keys(keeper: FakeKeeper) -> None:
    state = {"a": torch.ones(2)}
    ckpt = Checkpointer(state_dict=state)
    assert ckpt.save(1)
    state["b"] = torch.ones(3)
    assert ckpt.save(2)
    assert {item.spec.key for item in ckpt._snapshots.layout.items} == {"a", "b", "holdfast.extra"}  # type: ignore[union-attr]


def test_without_an_agent_nothing_is_left_behind() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    Job(0).train(1, 3)
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert not list(Path("/dev/shm").glob("holdfast*"))
