"""Steps that are made before the vote: taken back they leave no trace, and once voted they stay."""

import pytest
import torch

from holdfast.client.elastic.early_steps import EarlySteps
from holdfast.client.elastic.layer_state import LayerUnit, UnitError, digest_packed
from tests.client.elastic.test_layer_state import OPTIMIZERS, make, train


def give_gradient(unit: LayerUnit, step: int) -> LayerUnit:
    count = sum(parameter.numel() for parameter in unit.parameters)
    unit.gradient = torch.randn(count, generator=torch.Generator().manual_seed(step))
    return unit


def digest(unit: LayerUnit) -> str:
    return digest_packed(unit.pack())


class Spoiling(torch.optim.SGD):
    """An optimizer that changes gradients in place."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
        super().step(closure)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("made", [0, 3])
def test_a_step_that_is_taken_back_leaves_no_trace(optimizer: str, made: int) -> None:
    """Neither before the first step, when the optimizer has no state, nor later; and it can be made again."""
    unit, early = train(make(optimizer), 1, made), EarlySteps()
    for again in range(2):
        before = digest(unit)
        early.make(made + 1, {1: give_gradient(unit, made + 1)}, 0.5)
        assert not unit.whole and digest(unit) != before, "until the vote it is no state"
        assert early.take_back({1: unit}) == [1]
        assert (unit.step, digest(unit)) == (made, before), again
    unit.apply(made + 1, None, None)
    assert digest(unit) == digest(train(make(optimizer), 1, made + 1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_stands_is_the_one_of_the_vote(optimizer: str) -> None:
    unit, early = make(optimizer), EarlySteps()
    for step in range(1, 4):
        early.make(step, {1: give_gradient(unit, step)}, None)
        early.settle(step, {1: unit}, stands=True)
        unit.apply(step, None, None)
        assert unit.whole and unit.step == step and unit.gradient is None
        assert early.take_back({1: unit}) == [], "what is made is not taken back"
    assert digest(unit) == digest(train(make(optimizer), 1, 3))


def test_a_step_whose_gradients_are_scaled_is_made_otherwise() -> None:
    unit, early = train(make(), 1, 2), EarlySteps()
    other = give_gradient(train(make(), 1, 2), 3)
    other.apply(3, 0.25, None)
    early.make(3, {1: give_gradient(unit, 3)}, None)
    early.settle(3, {1: unit}, stands=False)
    unit.apply(3, 0.25, None)
    assert digest(unit) == digest(other)
    early.make(4, {1: give_gradient(unit, 4)}, None)
    assert unit.whole and digest(unit) == digest(other), "the next one waits for the vote"
    early.settle(4, {1: unit}, stands=True)
    unit.apply(4, None, None)
    early.make(5, {1: give_gradient(unit, 5)}, None)
    assert not unit.whole, "and the one after it does not"


def test_gradients_stay_as_they_are_whatever_the_optimizer_does() -> None:
    units = [LayerUnit(1, lambda: torch.nn.Linear(3, 3), lambda ps: Spoiling(ps, lr=0.1), 0) for _ in range(2)]
    early = EarlySteps()
    early.make(1, {1: give_gradient(units[0], 1)}, None)
    early.take_back({1: units[0]})
    for unit in (units[0], give_gradient(units[1], 1)):
        unit.apply(1, None, None)
    assert digest(units[0]) == digest(units[1])


def test_an_optimizer_that_is_interrupted_is_taken_back() -> None:
    class Interrupted(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)
            raise ConnectionError("amid a step")

    unit, early = LayerUnit(1, lambda: torch.nn.Linear(3, 3), lambda ps: Interrupted(ps, lr=0.1), 0), EarlySteps()
    before = digest(unit)
    with pytest.raises(ConnectionError):
        early.make(1, {1: give_gradient(unit, 1)}, None)
    assert not unit.whole
    assert early.take_back({1: unit}) == [1]
    assert digest(unit) == before


def test_a_copy_that_has_changed_is_not_given_back() -> None:
    unit, early = train(make(), 1, 2), EarlySteps()
    early.make(3, {1: give_gradient(unit, 3)}, None)
    tensor = early._copies[1]._tensors["module linear.weight"]
    tensor.view(torch.int32)[1, 2] ^= 1
    with pytest.raises(UnitError) as caught:
        early.take_back({1: unit})
    assert str(caught.value) == "layer 1 could not be taken back to step 2: its bits have changed"
    assert not unit.whole
