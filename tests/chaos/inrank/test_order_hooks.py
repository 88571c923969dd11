"""A rank carries out the orders in its node's folder: once, at the right step, and only its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.chaos.inrank.order_hooks import OrderHooks
from holdfast.chaos.rank_orders import RankDone, RankOrder, order_path, read_done, write_json


class Rank:
    """A script with one optimizer, and hooks as the zygote would have installed them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.obeying = OrderHooks()

    def step(self) -> float:
        loss: torch.Tensor = self.model(torch.ones(2, 4)).square().mean()
        loss.backward()
        self.obeying.before_step(self.optimizer, (), {})
        self.optimizer.step()
        self.obeying.after_step(self.optimizer, (), {})
        self.optimizer.zero_grad()
        return loss.item()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_KEEPER", str(tmp_path / "keeper.sock"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("HOLDFAST_SLOT", raising=False)
    return tmp_path


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    yield one
    one.obeying._remove_hooks()


def told(node: Path, id: int = 1) -> RankDone:
    found = read_done(node, id, 1)
    assert found is not None
    return found


def test_an_exception_at_its_step(node: Path, rank: Rank) -> None:
    order = RankOrder(id=1, ranks=(1,), deed="raise", step=3, error="TypeError: forward() takes 2")
    write_json(order_path(node, order), order)
    rank.step()
    rank.step()
    with pytest.raises(TypeError, match="takes 2"):
        rank.step()
    assert told(node).step == 3
    rank.step()
    again = Rank()
    again.step()
    again.step()
    again.step()  # of a later generation: once is once


def test_orders_to_others_are_not_ours(node: Path, rank: Rank) -> None:
    order = RankOrder(id=1, ranks=(0, 2), deed="raise", error="ValueError: no")
    write_json(order_path(node, order), order)
    for _ in range(3):
        rank.step()
    assert read_done(node, 1, 1) is None


@pytest.mark.parametrize("place", ["weights", "optimizer", "gradients"])
def test_bits_in_the_state(node: Path, rank: Rank, place: str) -> None:
    calm = Rank()
    calm.obeying._optimizer = 0  # it takes no orders
    for one in (calm, rank):
        one.step()
    order = RankOrder(id=1, ranks=(1,), deed="bits", place=place, bits="exponent", count=1, seed=4)
    write_json(order_path(node, order), order)
    for one in (calm, rank):
        one.step()
    assert told(node).what.startswith(place) and told(node).step == 2
    moments = [
        [state["exp_avg"] for state in one.optimizer.state.values()]
        + [state["exp_avg_sq"] for state in one.optimizer.state.values()]
        for one in (calm, rank)
    ]
    weights = [list(one.model.parameters()) for one in (calm, rank)]
    differ = {
        "weights": sum(int((a != b).sum()) for a, b in zip(*weights, strict=True)),
        "optimizer": sum(int((a != b).sum()) for a, b in zip(*moments, strict=True)),
    }
    assert differ["weights" if place == "weights" else "optimizer"] >= 1
    assert (differ["weights"] == 1) or place != "weights"


def test_nan_in_a_forward_pass(node: Path, rank: Rank) -> None:
    rank.step()
    order = RankOrder(id=1, ranks=(1,), deed="bits", place="activations", bits="nan")
    write_json(order_path(node, order), order)
    losses = [rank.step() for _ in range(3)]
    assert losses[0] == losses[0] and losses[1] != losses[1], "armed after a step, struck in the next"
    assert told(node).step == 3


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"])
def test_a_reduction_is_struck_before_it(node: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import torch.distributed as dist

    if not hasattr(dist, name):
        pytest.skip(f"this torch has no {name}")
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(dist, name, lambda tensor, **_: seen.append(tensor.clone()))
    order = RankOrder(id=1, ranks=(1,), deed="bits", place="all_reduce", bits="sign")
    write_json(order_path(node, order), order)
    rank.step()
    for _ in range(2):
        getattr(dist, name)(torch.ones(8))
    assert [int((one < 0).sum()) for one in seen] == [1, 0], "the first one, once"
    rank.step()
    assert told(node).what.startswith("all_reduce")


def test_by_chance(node: Path, rank: Rank) -> None:
    order = RankOrder(id=1, ranks=(1,), deed="bits", place="weights", bits="mantissa", chance=0.3, seed=1)
    write_json(order_path(node, order), order)
    steps = set()
    for _ in range(40):
        rank.step()
        if done := read_done(node, 1, 1):
            steps.add(done.step)
    assert 4 < len(steps) < 25
    order_path(node, order).unlink()
    last = told(node).step
    for _ in range(20):
        rank.step()
    assert told(node).step == last, "an order that was taken back holds no more"


def test_without_a_node_nothing_happens(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_KEEPER", raising=False)
    rank.step()
