"""Losses among logged metrics: which are taken, under which step, and when they are reported."""

import math

import pytest

from holdfast.client.training.logged_losses import LoggedLosses


class Rank:
    def __init__(self) -> None:
        self.told: list[tuple[int, object, object]] = []
        self.sources: list[str] = []
        self.losses = LoggedLosses(lambda *values: self.told.append(values), self.sources.append)

    def log(self, **metrics: object) -> None:
        self.losses.on_metrics("wandb.log", {name.replace("__", "/"): value for name, value in metrics.items()})


def test_values_of_one_step_are_reported_together_when_the_next_is_done() -> None:
    rank = Rank()
    rank.losses.on_step(1)
    rank.log(train__loss=2.5, lr=1e-3)
    rank.log(train__grad_norm=0.5)
    assert rank.told == []
    rank.losses.on_step(2)
    rank.losses.on_step(3)
    assert rank.told == [(1, 2.5, 0.5)]


def test_what_is_not_finite_is_reported_at_once() -> None:
    rank = Rank()
    rank.losses.on_step(4)
    rank.log(loss=math.nan)
    [(step, loss, _)] = rank.told
    assert step == 4 and isinstance(loss, float) and math.isnan(loss)


def test_the_first_name_stays_and_is_announced_once() -> None:
    rank = Rank()
    for step in range(1, 5):
        rank.losses.on_step(step)
        rank.log(loss=1.0 * step, val__loss=9.0)
        rank.log(train__loss=8.0)
    assert [loss for _, loss, _ in rank.told] == [1.0, 2.0, 3.0]
    assert rank.sources == ["wandb.log('loss')"]


def test_parts_of_a_step_are_added_up() -> None:
    rank = Rank()
    for step in (1, 2):
        rank.losses.on_part("Trainer.training_step", 0.25)
        rank.losses.on_part("Trainer.training_step", 0.5)
        rank.losses.on_step(step)
        rank.log(loss=9.0, grad_norm=0.1 * step)
    rank.losses.on_step(3)
    assert rank.told == [(1, 0.75, 0.1), (2, 0.75, 0.2)]


def test_nothing_is_reported_before_the_first_step() -> None:
    rank = Rank()
    rank.log(loss=math.nan)
    rank.losses.on_step(1)
    rank.losses.on_step(2)
    assert rank.told == []


@pytest.mark.parametrize("value", ["2.5", True, None, object(), [1.0], {"a": 1}])
def test_what_is_no_number_is_left_out(value: object) -> None:
    rank = Rank()
    rank.losses.on_step(1)
    rank.log(loss=value)
    rank.losses.on_step(2)
    assert rank.told == []


def test_a_report_that_fails_harms_nobody() -> None:
    def fail(*_values: object) -> None:
        raise OSError("the slot is gone")

    losses = LoggedLosses(fail, lambda source: None)
    losses.on_step(1)
    losses.on_metrics("wandb.log", {"loss": math.inf})
    losses.on_step(2)
