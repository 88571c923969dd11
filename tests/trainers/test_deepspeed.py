"""What is kept of a DeepSpeed engine, and how calls pass through ours; DeepSpeed is played, the Checkpointer is not."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.trainers.optimizer_shards import ShardCheckpointer
from tests.trainers.played_ranks import import_beside

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


class PlayedZero:
    """ZeRO 1 and 2 on one rank: a flat master copy of the weights, in an optimizer of torch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = [*model.parameters()]
        self.master = torch.cat([weight.detach().flatten() for weight in self._weights]).requires_grad_(True)
        self.optimizer = torch.optim.AdamW([self.master], lr=0.1)
        self.loss_scaler = SimpleNamespace(cur_scale=8.0)
        self.cpu_offload = False

    def step(self) -> None:
        grads = (torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self._weights)
        self.master.grad = torch.cat([grad.flatten() for grad in grads])
        self.optimizer.step()
        self.update_lp_params()

    def update_lp_params(self) -> None:
        parts = self.master.detach().split([weight.numel() for weight in self._weights])
        with torch.no_grad():
            for weight, part in zip(self._weights, parts, strict=True):
                weight.copy_(part.reshape(weight.shape))


class PlayedEngine:
    """As much of a DeepSpeedEngine as is asked for."""

    def __init__(self, *, is_split: bool = False) -> None:
        torch.manual_seed(7)
        self.module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.module[0].weight.requires_grad_(is_split)  # frozen, as under LoRA
        self.optimizer: Any = PlayedZero(self.module) if is_split else torch.optim.AdamW(self.module.parameters(), 0.1)
        self.lr_scheduler = None
        self.has_moe_layers = False
        self.mp_world_size = 1
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.saved: list[tuple[Any, ...]] = []

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.global_steps += 1

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        self.saved.append((save_dir, tag, client_state, save_latest, exclude_frozen_parameters))
        return True

    def train(self, steps: int) -> None:
        for _ in range(self.global_steps, steps):
            self.backward(self.module(torch.arange(8.0).reshape(2, 4)).square().sum())
            self.step()

    def tell(self) -> list[bytes]:
        return [tensor.numpy().tobytes() for tensor in self.module.state_dict().values()]


class PlayedPipeline(PlayedEngine):
    """DeepSpeed's PipelineEngine."""


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    library: dict[str, dict[str, Any]] = {
        "deepspeed.runtime.engine": {"DeepSpeedEngine": PlayedEngine},
        "deepspeed.runtime.pipe.engine": {"PipelineEngine": PlayedPipeline},
        "deepspeed.runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": PlayedZero},
    }
    return import_beside(monkeypatch, "holdfast.trainers.deepspeed", library)


@pytest.mark.parametrize("is_split", [False, True])
def test_an_engine_goes_on_where_it_was(
    deepspeed: ModuleType, is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, made = PlayedEngine(is_split=is_split), list[ShardCheckpointer]()

    def make(*args: Any, **more: Any) -> ShardCheckpointer:
        made.append(ShardCheckpointer(*args, **more))
        return made[-1]

    monkeypatch.setattr(deepspeed, "ShardCheckpointer", make)
    deepspeed.hold_engine(first, path=tmp_path / "ckpt", every=1)
    first.train(3)
    assert first.tell() != PlayedEngine(is_split=is_split).tell()
    again = PlayedEngine(is_split=is_split)
    made[0].close()
    deepspeed.hold_engine(again, path=tmp_path / "ckpt", every=1)
    assert again.global_steps == 3 and again.tell() == first.tell()


def test_every_argument_of_save_checkpoint_is_passed_on(deepspeed: ModuleType) -> None:
    engine = PlayedEngine()
    deepspeed.hold_engine(engine)
    assert engine.save_checkpoint("out")
    assert engine.save_checkpoint("out", "ten", {"place": 10}, False, True)
    assert engine.save_checkpoint("out", client_state={"place": 11}, save_latest=False)
    told = [(where, tag, {*state}, *rest) for where, tag, state, *rest in engine.saved]
    assert told == [
        ("out", None, {"holdfast_generators"}, True, False),
        ("out", "ten", {"place", "holdfast_generators"}, False, True),
        ("out", None, {"place", "holdfast_generators"}, False, False),
    ]


@pytest.mark.parametrize("is_split", [False, True])
def test_what_cannot_be_kept_is_refused(deepspeed: ModuleType, is_split: bool) -> None:
    engine = PlayedEngine(is_split=is_split)
    assert deepspeed.refusal_of(engine) == ""
    assert deepspeed.refusal_of(PlayedPipeline(is_split=is_split))
    engine.has_moe_layers = True
    assert deepspeed.refusal_of(engine)
    engine.has_moe_layers = False
    engine.optimizer.cpu_offload = True
    assert bool(deepspeed.refusal_of(engine)) == is_split
    engine.optimizer = object()
    assert deepspeed.refusal_of(engine)


@pytest.mark.parametrize(("slices", "replicated"), [(1, True), (2, None)])
def test_ranks_with_different_slices_of_weights_are_no_replicas_of_each_other(
    deepspeed: ModuleType, slices: int, replicated: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(deepspeed, "ShardCheckpointer", lambda *args, **more: told.update(more))
    engine = PlayedEngine()
    engine.mp_world_size = slices
    deepspeed.hold_engine(engine)
    assert told["replicated"] is replicated
