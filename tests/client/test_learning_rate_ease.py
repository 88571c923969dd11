"""Steps at a part of the learning rate: bit for bit as by hand, and nobody else sees it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.client.training import progress as client
from holdfast.client.training.learning_rate_ease import LearningRateEase
from holdfast.client.training.progress import RankProgress
from tests.client.conftest import ENV, Zygote
from tests.client.job import OPTIMIZERS, Net

TOLD = "0.5:4-6,0.25:6-6"
BY_HAND = {4: (0.5,), 5: (0.5,), 6: (0.5, 0.25)}


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankProgress]:
    monkeypatch.delenv("HOLDFAST_SLOT", raising=False)
    monkeypatch.setenv("HOLDFAST_EASE", TOLD)
    found = RankProgress()
    assert found.find_slot() is None
    yield found
    if found._easing is not None:
        found._easing.close()


class Training:
    """Ten steps of one kind of optimizer, and the rates that a scheduler and the optimizer's own step have seen."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.optimizers = OPTIMIZERS[name](self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.9)
        self.scheduled: list[Any] = []

    def run(self, before: Callable[[int], Callable[[], None]]) -> dict[str, Any]:
        for step in range(1, 11):
            self.model(torch.randn(8, 6)).square().mean().backward()
            after = before(step)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            after()
            self.schedule.step()
            self.scheduled.append([float(group["lr"]) for o in self.optimizers for group in o.param_groups])
        return {
            name: value.clone() for name, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)
        }

    def by_hand(self, step: int) -> Callable[[], None]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]
        for group in groups:
            for factor in BY_HAND.get(step, ()):
                group["lr"] = group["lr"] * factor

        def after() -> None:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

        return after


@pytest.mark.parametrize("name", ["adamw", "momentum", "adafactor", "groups", "two"])
@pytest.mark.parametrize("tells", ["step", "asked", "both"])
def test_it_is_bit_for_bit_as_by_hand(progress: RankProgress, name: str, tells: str) -> None:
    def told(step: int) -> Callable[[], None]:
        if tells != "step":
            progress.announce_step(step)
        return lambda: progress.step(step) if tells != "asked" else None

    if tells == "step":
        progress.on_restored(0, 0.0)
    eased = Training(name)
    found = eased.run(told)
    assert progress._easing is not None
    progress._easing.close()
    hand, plain = Training(name), Training(name)
    by_hand, without = hand.run(hand.by_hand), plain.run(lambda step: lambda: None)
    assert all(torch.equal(found[key], by_hand[key]) for key in by_hand)
    assert any(not torch.equal(found[key], without[key]) for key in without)
    assert eased.scheduled == plain.scheduled == hand.scheduled


def one_step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_step_with_an_unknown_number_is_not_eased(progress: RankProgress) -> None:
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=1.0)
    one_step(optimizer)
    assert p.item() == -1.0
    progress.step(3)
    one_step(optimizer)
    assert p.item() == -1.5
    one_step(optimizer)
    assert p.item() == -2.0, "the same step is still being made until another one is told"
    progress.step(6)
    one_step(optimizer)
    assert p.item() == -3.0


def test_one_told_as_done_before_the_optimizer_is_the_one_asked_about(progress: RankProgress) -> None:
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=1.0)
    for step in range(1, 8):
        progress.announce_step(step)
        progress.step(step)
        one_step(optimizer)
    assert p.item() == -(1 + 1 + 1 + 0.5 + 0.5 + 0.125 + 1)


def test_a_step_that_raises_leaves_nothing_behind(progress: RankProgress) -> None:
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if broken:
                raise RuntimeError("out of memory")
            return super().step(closure)

    broken = True
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Breaks([p], lr=1.0)
    progress.announce_step(4)
    with pytest.raises(RuntimeError):
        one_step(optimizer)
    broken = False
    one_step(optimizer)
    assert (p.item(), optimizer.param_groups[0]["lr"]) == (-0.5, 1.0)
    broken = True
    progress.announce_step(5)
    with pytest.raises(RuntimeError):
        one_step(optimizer)
    other = torch.optim.SGD([q := torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    progress.announce_step(7)
    one_step(other)
    assert (q.item(), optimizer.param_groups[0]["lr"]) == (-1.0, 1.0)


def test_an_optimizer_that_works_through_another_is_eased_once(progress: RankProgress) -> None:
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    class Outer(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([p], {"lr": 1.0})
            self.inner = torch.optim.SGD([p], lr=1.0)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            self.inner.step()

    outer = Outer()
    progress.announce_step(4)
    one_step(outer)
    assert (p.item(), outer.param_groups[0]["lr"]) == (-0.5, 1.0)
    progress.announce_step(7)
    one_step(outer)
    assert p.item() == -1.5


def test_a_rate_that_is_a_tensor_is_put_back_untouched(progress: RankProgress) -> None:
    rate = torch.tensor(1.0, dtype=torch.float64)
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=rate, foreach=False)
    progress.announce_step(4)
    one_step(optimizer)
    assert p.item() == -0.5
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 1.0


def test_a_rate_that_the_step_itself_sets_stays(progress: RankProgress) -> None:
    class Sets(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["lr"] = 0.125
            return super().step(closure)

    optimizer = Sets([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    progress.announce_step(4)
    one_step(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_without_a_word_there_is_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.optim import optimizer as torch_optimizer

    monkeypatch.delenv("HOLDFAST_EASE", raising=False)
    before = len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)
    found = RankProgress()
    found.find_slot()
    found.step(1)
    found.announce_step(2)
    assert found._easing is None
    assert before == (
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
    )


def test_what_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOLDFAST_EASE", "2:1-4")
    monkeypatch.delenv("HOLDFAST_SLOT", raising=False)
    found = client.RankProgress()
    found.step(1)
    assert found._easing is None
    assert "HOLDFAST_EASE=2:1-4" in capfd.readouterr().err
    with pytest.raises(ValueError, match=r"^2 "):
        LearningRateEase("2:1-4")


SCRIPT = """
import json, sys, torch, holdfast
model = torch.nn.Linear(2, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer)
make = torch.compile(optimizer.step, backend="eager") if sys.argv[1:] else optimizer.step
went = []
for step in range(ckpt.restore() + 1, 9):
    before = model.weight[0, 0].item()
    model(torch.ones(2).double()).backward()
    make()
    optimizer.zero_grad()
    went.append(before - model.weight[0, 0].item())
    holdfast.step(step)
print(json.dumps(went))
"""


WANTED = [1.0, 1.0, 1.0, 0.5, 0.5, 0.125, 1.0, 1.0]


@pytest.mark.e2e
def test_in_a_rank(warm: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = warm.run(str(script), HOLDFAST_EASE=TOLD)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == WANTED


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("compiled",)])
def test_in_a_fresh_interpreter(tmp_path: Path, more: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *more]
    ended = subprocess.run(command, env=ENV | {"HOLDFAST_EASE": TOLD}, check=True, timeout=200, stdout=subprocess.PIPE)
    assert json.loads(ended.stdout) == WANTED
