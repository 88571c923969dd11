"""Megatron-LM's `pretrain` with our line before it; Megatron is played, its loop with its parts looked up by name."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.checkpoint.state_image import StateError
from tests.trainers.played_ranks import import_beside
from tests.trainers.test_megatron import Chained, ParallelState, PlayedOptimizer, Split, Wrapped, save_own

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
TRAINING = """
def pretrain(make, stop_at):
    args = get_args()
    model, optimizer, schedule = setup_model_and_optimizer(make)
    torch.rand(args.iteration + 1)  # as loaders of batches draw when they are made
    for iteration in range(args.iteration + 1, stop_at + 1):
        losses, skipped, *_ = train_step(model, optimizer)
        args.consumed_train_samples += 4
        if iteration % 2 == 0:
            evaluate_and_print_results(iteration)
        if checkpoint_and_decide_exit(model, optimizer, schedule, iteration, 1000.0 * iteration, {}, None):
            break
    return model[0]

def setup_model_and_optimizer(make):
    args = get_args()
    loaded.append((args.load, args.ckpt_step))
    args.iteration = args.ckpt_step if args.load and args.ckpt_step else 0
    model, optimizer = make()
    return [model], optimizer, None

def train_step(model, optimizer):
    drawn.append(torch.rand(()).item())
    model[0].module.weight.grad = None
    model[0].module().backward()
    optimizer.step()
    return {"lm loss": torch.tensor([0.5])}, skips, False, False, 0, 2.0, None, 0

def evaluate_and_print_results(iteration):
    phases.append(iteration)

def save_checkpoint_and_time(iteration):
    raise AssertionError

def checkpoint_and_decide_exit(
    model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far, context, data_iterator
):
    return False
"""


class PlayedMegatron:
    """One process of Megatron-LM after another, each with its arguments as they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.loaded: list[tuple[str | None, int | None]] = []
        self.updated: list[int] = []
        self.phases: list[int] = []
        self.drawn: list[float] = []
        self.steps: list[tuple[int, dict[str, Any]]] = []
        self.skips = 0
        self.source = TRAINING

    def start(self, load: str | None = None) -> tuple[ModuleType, Callable[[int], Wrapped]]:
        """A new process: our module, and `pretrain` up to a step."""
        self.args = SimpleNamespace(
            load=load, pretrained_checkpoint=None, ckpt_step=None, consumed_train_samples=0, skipped_train_samples=0
        )
        told: dict[str, Any] = {"torch": torch, "loaded": self.loaded, "phases": self.phases, "drawn": self.drawn}
        told["skips"] = self.skips
        tracker = SimpleNamespace(get_states=dict, set_states=lambda states: None)
        optimizers = {"MegatronOptimizer": PlayedOptimizer, "MixedPrecisionOptimizer": int, "ChainedOptimizer": Chained}
        microbatches = {"update_num_microbatches": lambda count, consistency_check: self.updated.append(count)}
        library: dict[str, dict[str, Any]] = {
            "megatron.core": {
                "parallel_state": ParallelState(),
                "tensor_parallel": SimpleNamespace(get_cuda_rng_tracker=lambda: tracker),
            },
            "megatron.core.optimizer.distrib_optimizer": {"DistributedOptimizer": Split},
            "megatron.core.optimizer.optimizer": optimizers,
            "megatron.core.num_microbatches_calculator": microbatches,
            "megatron.training.training": {},
        }
        import_beside(self._patch, "holdfast.trainers.megatron", library)
        ours = import_beside(self._patch, "holdfast.trainers.megatron_pretrain", {})
        place = sys.modules["megatron.training.training"]
        vars(place).update(told, get_args=lambda: self.args)
        exec(self.source, vars(place))
        self._patch.setattr(ours.holdfast, "step", lambda step, **reported: self.steps.append((step, reported)))
        self._patch.setattr(ours, "HeldMegatron", self._hold(ours.HeldMegatron))

        def make() -> tuple[Wrapped, Any]:
            torch.manual_seed(0)
            model = Wrapped()
            return model, Chained(Split(model))

        return ours, lambda stop_at: place.pretrain(make, stop_at)

    def end(self) -> None:
        """What the end of a process does."""
        self._held._held.close()

    def _hold(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        def hold(*args: Any, **kwargs: Any) -> Any:
            self._held = kind(*args, **kwargs)
            return self._held

        return hold


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> PlayedMegatron:
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: group)
    return PlayedMegatron(monkeypatch)


def test_pretrain_goes_on_where_it_was(megatron: PlayedMegatron, tmp_path: Path) -> None:
    _, calm = megatron.start()
    expected = calm(5).module.weight
    drawn = [*megatron.drawn]
    megatron.loaded.clear()
    megatron.drawn.clear()
    ours, pretrain = megatron.start(load="own")
    ours.hold_pretrain(path=tmp_path / "ckpt", every=1)
    pretrain(3)
    megatron.end()
    assert [step for step, _ in megatron.steps] == [1, 2, 3]
    assert megatron.steps[0][1] == {"loss": torch.tensor([0.5]), "grad_norm": 2.0}
    ours, again = megatron.start(load="own")
    ours.hold_pretrain(path=tmp_path / "ckpt", every=1)
    assert again(5).module.weight.equal(expected)
    assert [step for step, _ in megatron.steps] == [1, 2, 3, 4, 5] and megatron.phases == [2, 4, 2, 4]
    assert megatron.drawn == drawn
    assert megatron.loaded == [("own", None), (None, None)] and megatron.args.load == "own"
    assert megatron.args.consumed_train_samples == 20 and megatron.updated == [12]
    assert megatron.args.num_floating_point_operations_so_far == 3000.0


def test_a_step_that_was_skipped_has_no_loss(megatron: PlayedMegatron) -> None:
    megatron.skips = 1
    ours, pretrain = megatron.start()
    ours.hold_pretrain()
    pretrain(2)
    assert megatron.steps == [(1, {}), (2, {})]


def test_without_a_state_of_ours_the_newest_whole_checkpoint_is_taken(
    megatron: PlayedMegatron, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's own file names a step of which a part is missing."""
    for step in (3, 7):
        save_own(tmp_path / f"iter_000000{step}", "model.weight", "optimizer.state.exp_avg")
    next((tmp_path / "iter_0000007").glob("*.distcp")).unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    ours, pretrain = megatron.start(load=str(tmp_path))
    ours.hold_pretrain()
    pretrain(4)
    assert megatron.loaded == [(str(tmp_path), 3)] and [step for step, _ in megatron.steps] == [4]
    assert megatron.args.ckpt_step is None
    used = f"holdfast: {tmp_path}/iter_0000003 is used, the newest whole one; Megatron would have taken step 7"
    assert used in capsys.readouterr().err.splitlines()


def test_another_loop_is_refused_by_the_name_of_what_it_lacks(megatron: PlayedMegatron) -> None:
    megatron.source = TRAINING.replace("def checkpoint_and_decide_exit", "def decide")
    ours, _ = megatron.start()
    with pytest.raises(StateError) as refused:
        ours.hold_pretrain()
    assert "checkpoint_and_decide_exit" in str(refused.value)
