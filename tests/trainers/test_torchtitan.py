"""Which state a trainer of TorchTitan goes on from; TorchTitan itself is played, the Checkpointer is real."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from holdfast.checkpoint.state_image import StateError
from holdfast.trainers import newest_trainer_checkpoint
from holdfast.wire.progress_environment import KEEPER
from tests.client.fake_keeper import FakeKeeper
from tests.trainers.played_ranks import PlayedRanks, import_beside

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.fixture
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return import_beside(monkeypatch, "holdfast.trainers.torchtitan", {"torchtitan.trainer": {"Trainer": object}})


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKeeper]:
    fake = FakeKeeper(tmp_path)
    monkeypatch.setenv(KEEPER, str(fake.path))
    yield fake
    fake.close()


class OwnCheckpoints:
    """The trainer's own checkpointer: it notes what it is asked to load, and loads the step alone."""

    def __init__(self, trainer: "PlayedTrainer", folder: Path) -> None:
        self.folder = str(folder)
        self.loaded: list[int] = []
        self.meet: Callable[[int], object] = str  # what the other ranks take part in
        self._trainer = trainer

    def load(self, step: int = -1) -> bool:
        self.meet(step)
        self.loaded.append(step)
        self._trainer.step = max(step, 0)
        return step > 0

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return False


class Stateful:
    """A schedule or a loader."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


class PlayedTrainer:
    """As much of a Trainer as is asked for."""

    def __init__(self, folder: Path, *, pp: bool = False) -> None:
        self.parallel_dims = SimpleNamespace(pp=1 + pp, dp_replicate=1, dp_shard=1, cp=1, tp=1, pp_enabled=pp)
        self.model_parts = [torch.nn.Linear(2, 2)]
        self.optimizers = [torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)]
        self.lr_schedulers, self.dataloader = Stateful(), Stateful()
        self.metrics_processor = SimpleNamespace(log=lambda *args: None)
        self.checkpointer: Any = OwnCheckpoints(self, folder)
        self.own: OwnCheckpoints = self.checkpointer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, steps: int) -> None:
        while self.step < steps:
            self.step += 1
            self.checkpointer.save(self.step)


def start(torchtitan: ModuleType, tmp_path: Path, load_step: int = -1) -> PlayedTrainer:
    """Return a trainer that has asked for its state, as `Trainer.train` does first."""
    trainer = PlayedTrainer(tmp_path / "own")
    torchtitan.hold_trainer(trainer, path=tmp_path / "ckpt", every=1)
    trainer.checkpointer.load(step=load_step)
    return trainer


def test_a_named_step_is_loaded_once_and_not_after_every_fault(
    torchtitan: ModuleType, keeper: FakeKeeper, tmp_path: Path
) -> None:
    first = start(torchtitan, tmp_path, load_step=3)
    assert first.own.loaded == [3] and first.step == 3
    first.train(5)
    again = start(torchtitan, tmp_path, load_step=3)
    assert again.own.loaded == [] and again.step == 5
    assert again.model_parts[0].weight.equal(first.model_parts[0].weight)


def test_a_named_step_comes_before_states_that_the_job_has_not_chosen(torchtitan: ModuleType, tmp_path: Path) -> None:
    first = start(torchtitan, tmp_path)
    first.train(5)
    first.checkpointer._checkpointer.close()
    newest = start(torchtitan, tmp_path)
    assert newest.own.loaded == [] and newest.step == 5
    named = start(torchtitan, tmp_path, load_step=3)
    assert named.own.loaded == [3] and named.step == 3
    with pytest.raises(StateError):
        named.train(4)  # the next restore would take step 5


def test_ranks_that_see_different_folders_ask_together(
    torchtitan: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of one rank is not there yet, as behind a cache of NFS; `load` is a collective of TorchTitan, too."""
    whole = tmp_path / "own" / "step-7"
    torch_dcp.save({"weight": torch.ones(3)}, checkpoint_id=whole, no_dist=True)
    ranks = PlayedRanks(2)
    for module in (torchtitan, newest_trainer_checkpoint):
        monkeypatch.setattr(module, "RankWorld", lambda: ranks)

    def load_on(rank: int, seen: str) -> tuple[bool, list[int]]:
        trainer = PlayedTrainer(tmp_path / seen, pp=True)
        trainer.own.meet = lambda step: ranks.meet("load", step)
        held = torchtitan.HeldCheckpoints(trainer, {})
        return held.load(), trainer.own.loaded

    assert ranks.run(lambda rank: load_on(rank, "own")) == [(True, [7]), (True, [7])]
    assert ranks.run(lambda rank: load_on(rank, "none")) == [(False, [-1]), (False, [-1])]
    assert ranks.run(lambda rank: load_on(rank, "none" if rank else "own")) == [(False, []), (False, [])]
