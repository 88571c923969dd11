"""A save may take the tensors of the last one unseen, if whoever copies them asks later whether they still hold."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import holdfast
from holdfast.client.checkpointing.model_state import ModelState
from holdfast.client.snapshot.state_item_locations import CurrentItems

pytestmark = pytest.mark.timeout(60)


class Job:
    def __init__(self) -> None:
        self.first, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.model = nn.Sequential(self.first, self.norm)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ckpt = holdfast.Checkpointer(model=self.model, optimizer=self.optimizer)

    def step(self) -> None:
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def read(self) -> CurrentItems:
        assert isinstance(self.ckpt._source, ModelState)
        return self.ckpt._source.read(checks_later=True)


@pytest.fixture
def job() -> Job:
    job = Job()
    job.step()
    assert job.read().is_current is None, "nothing is known of the state yet"
    assert job.read().is_current is None, "it was seen once"
    return job


def exchange_parameter(job: Job) -> None:
    job.first.weight = nn.Parameter(torch.zeros(2, 3))


def exchange_buffer(job: Job) -> None:
    job.norm.running_mean = torch.zeros(2)


def exchange_moment(job: Job) -> None:
    job.optimizer.state[job.first.weight]["exp_avg"] = torch.zeros(2, 3)


def load_optimizer(job: Job) -> None:
    job.optimizer.load_state_dict(job.optimizer.state_dict())


def lose_moment(job: Job) -> None:
    del job.optimizer.state[job.first.weight]["exp_avg"]


def lose_state(job: Job) -> None:
    job.optimizer.state.clear()


def add_group(job: Job) -> None:
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_what_only_changes_in_place_holds(job: Job) -> None:
    found = job.read()
    assert found.is_current is not None
    job.step()
    job.optimizer.param_groups[0]["lr"] = 0.05
    assert found.is_current()
    again = job.read()
    assert again.version == found.version and again.is_current is not None
    rates = [[one for one in items.all if isinstance(one, float) and one in (0.1, 0.05)] for items in (found, again)]
    assert rates == [[0.1], [0.05]], "values are of the moment of the save"


EXCHANGES = [exchange_parameter, exchange_buffer, exchange_moment, load_optimizer, lose_moment, lose_state, add_group]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_was_exchanged_is_seen(job: Job, exchange: Callable[[Job], None]) -> None:
    found = job.read()
    assert found.is_current is not None and found.is_current()
    exchange(job)
    assert not found.is_current()


def test_a_restored_state_is_looked_at_first(job: Job) -> None:
    source = job.ckpt._source
    assert isinstance(source, ModelState)
    job.ckpt.save(1)
    snapshots = job.ckpt._snapshots
    assert snapshots is not None
    source.restore_image(snapshots.images[snapshots.arena.list_sealed()[0].slot], ())
    assert job.read().is_current is None
