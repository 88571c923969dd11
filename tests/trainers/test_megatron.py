"""What is kept of a Megatron model, and by whom; Megatron itself is played, the Checkpointer is real."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from holdfast.checkpoint.state_image import StateError
from tests.trainers.played_ranks import PlayedRanks, import_beside

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
CONFIG = {"use_precision_aware_optimizer": False, "reuse_grad_buf_for_mxfp8_param_ag": False}


class PlayedOptimizer:
    """An optimizer around one of torch's; also stands for Megatron's other classes, in parts."""

    def __init__(self, model: torch.nn.Module, **config: bool) -> None:
        self.optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
        self.config = SimpleNamespace(**{**CONFIG, **config})
        self.ddp_config = SimpleNamespace(use_megatron_fsdp=False)

    def step(self) -> None:
        self.optimizer.step()


class Split(PlayedOptimizer):
    """Megatron's distributed optimizer."""


class Chained:
    """Megatron's ChainedOptimizer."""

    def __init__(self, *chained: PlayedOptimizer) -> None:
        self.chained_optimizers = [*chained]

    def step(self) -> None:
        for one in self.chained_optimizers:
            one.step()


class Router(torch.nn.Module):
    """A weight and a persistent buffer that training changes, as Megatron's router has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.expert_bias: torch.Tensor
        self.register_buffer("expert_bias", torch.zeros(4))

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            self.expert_bias.add_(1.0)
        return (self.weight * self.expert_bias).sum()


class Wrapped(torch.nn.Module):
    """Its state dict has no `module.` in its names, as in Megatron's DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Router()
        self.synced = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def start_param_sync(self, *, force_sync: bool) -> None:
        assert force_sync
        self.synced += 1


class ParallelState:
    """The groups are lists of ranks."""

    def __init__(self) -> None:
        self.replicas = self.expert_replicas = [0]

    def get_data_parallel_group(self, with_context_parallel: bool = False) -> list[int]:
        assert with_context_parallel
        return self.replicas

    def get_expert_data_parallel_group(self) -> list[int]:
        return self.expert_replicas


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> ParallelState:
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: group)
    return ParallelState()


@pytest.fixture
def megatron(state: ParallelState, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    tracker = SimpleNamespace(get_states=dict, set_states=lambda states: None)
    optimizers = {"MegatronOptimizer": PlayedOptimizer, "MixedPrecisionOptimizer": int, "ChainedOptimizer": Chained}
    library: dict[str, dict[str, Any]] = {
        "megatron.core": {
            "parallel_state": state,
            "tensor_parallel": SimpleNamespace(get_cuda_rng_tracker=lambda: tracker),
        },
        "megatron.core.optimizer.distrib_optimizer": {"DistributedOptimizer": Split},
        "megatron.core.optimizer.optimizer": optimizers,
    }
    return import_beside(monkeypatch, "holdfast.trainers.megatron", library)


@pytest.mark.parametrize("kind", [PlayedOptimizer, Split])
def test_weights_states_and_buffers_come_back(
    megatron: ModuleType, kind: type[PlayedOptimizer], tmp_path: Path
) -> None:
    def make() -> tuple[Wrapped, PlayedOptimizer, Any]:
        model = Wrapped()
        optimizer = kind(model)
        return model, optimizer, megatron.HeldMegatron([model], Chained(optimizer), path=tmp_path / "ckpt", every=1)

    model, optimizer, held = make()
    assert held.step == 0
    for step in (1, 2, 3):
        model.module().backward()
        optimizer.step()
        held.save(step)
    held._held.close()
    again, new, restored = make()
    assert restored.step == 3 and again.synced == (kind is Split)
    assert again.module.weight.equal(model.module.weight) and again.module.expert_bias.equal(torch.full((4,), 3.0))
    kept, saved = new.optimizer.state[again.module.weight], optimizer.optimizer.state[model.module.weight]
    assert kept["exp_avg"].equal(saved["exp_avg"]) and kept["step"] == 3


@pytest.mark.parametrize(
    ("kind", "experts", "replicated"),
    [
        (PlayedOptimizer, [[0, 1, 2, 3]] * 4, [0, 1, 2, 3]),
        (PlayedOptimizer, [[0, 2], [1, 3], [0, 2], [1, 3]], None),  # each expert is on two of the four ranks
        (Split, [[0, 1, 2, 3]] * 4, None),
    ],
)
def test_ranks_with_different_experts_are_no_replicas_of_each_other(
    megatron: ModuleType,
    kind: type[PlayedOptimizer],
    experts: list[list[int]],
    replicated: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []

    class NotedShards:
        def __init__(self, *args: Any, **more: Any) -> None:
            told.append(more["replicated"])

        def restore(self, gather: object) -> int:
            return 0

    ranks, state = PlayedRanks(4), megatron.parallel_state
    state.replicas = [0, 1, 2, 3]
    monkeypatch.setattr(state, "get_expert_data_parallel_group", lambda: experts[ranks.rank])
    monkeypatch.setattr(megatron, "ShardCheckpointer", NotedShards)
    monkeypatch.setattr(megatron, "RankWorld", lambda: ranks, raising=False)
    monkeypatch.setattr(megatron.holdfast, "attach", lambda model: None)

    def hold(rank: int) -> None:
        model = Wrapped()
        megatron.HeldMegatron([model], kind(model))

    ranks.run(hold)
    assert told == [replicated] * 4


def save_own(folder: Path, *names: str) -> None:
    """As `dist_checkpointing.save` lays it out."""
    torch_dcp.save({name: torch.ones(8) for name in names}, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": 7}, folder / "common.pt")


def test_beside_the_weights_of_others_the_newest_own_checkpoint_is_found(
    megatron: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has weights to begin with, too: converted ones, some of the first format, and some of another job."""
    own = ("model.weight", "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg")
    save_own(tmp_path / "iter_0000003", *own)
    save_own(tmp_path / "iter_0000007", *own)
    save_own(tmp_path / "release", "model.weight")
    save_own(tmp_path / "iter_0500000", "model.weight")
    old = tmp_path / "iter_0600000" / "mp_rank_00"
    old.mkdir(parents=True)
    torch.save({"model": {}}, old / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    found = megatron.newest_checkpoint(tmp_path)
    assert found == (7, str(tmp_path / "iter_0000007"))
    used = f"{tmp_path}/iter_0000007, the newest whole one, is used"
    assert capsys.readouterr().err.splitlines() == [
        f"holdfast: {tmp_path}/iter_0600000 is left out: metadata.json is missing; {used}",
        f"holdfast: {tmp_path}/iter_0500000 is left out: it has weights alone, and no state of an optimizer; {used}",
    ]
    shards = tmp_path / "iter_0000007" / "__0_0.distcp"
    shards.write_bytes(shards.read_bytes()[:-1])
    assert megatron.newest_checkpoint(tmp_path) == (3, str(tmp_path / "iter_0000003"))


def test_what_cannot_be_kept_is_refused(megatron: ModuleType) -> None:
    model = Wrapped()
    assert megatron.refusal_of([PlayedOptimizer(model)]) == ""
    refused = [
        PlayedOptimizer(model, use_precision_aware_optimizer=True),
        PlayedOptimizer(model, reuse_grad_buf_for_mxfp8_param_ag=True),
        PlayedOptimizer(model),
        Split(model),
    ]
    refused[2].optimizer = object()
    refused[3].ddp_config.use_megatron_fsdp = True
    for one in refused:
        with pytest.raises(StateError):
            megatron.HeldMegatron([model], Chained(PlayedOptimizer(model), one))
