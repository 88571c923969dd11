"""A small network, trained by the Trainer of TorchTitan on numbers it counts itself; it survives faults exactly.

    holdfast run --nproc-per-node=2 examples/trainer_torchtitan.py --ckpt DIR

The one line of ours is `hold_trainer(trainer, path=...)`, before `trainer.train()`. FSDP 2 splits the model, which is
our own, since TorchTitan's language models need a GPU. It has no dropout: TorchTitan's own checkpoints hold no random
numbers, so that a run which goes on from one would end in other weights.
"""

import argparse
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

if not torch.cuda.is_available():  # TorchTitan asks torch once, when it is imported, what it runs on
    torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.components.metrics as titan_metrics
import torchtitan.distributed.utils as titan_utils
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.protocols import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from holdfast.trainers.torchtitan import hold_trainer

VOCABULARY, LENGTH, WIDTH = 32, 8, 16


class CountingModel(BaseModel):  # type: ignore[misc]  # of a library that may be missing
    """Says which number follows."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):  # type: ignore[misc]
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None: ...

        def get_nparams_and_flops(self, model: Module, seq_len: int) -> tuple[int, int]:
            count = sum(parameter.numel() for parameter in model.parameters())
            return count, 6 * count

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner = torch.nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        self.outer = torch.nn.Parameter(torch.empty(WIDTH, VOCABULARY))

    def init_states(self, *, buffer_device: Any = None) -> None:
        torch.nn.init.normal_(self.inner)
        torch.nn.init.normal_(self.outer)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.one_hot(tokens, VOCABULARY).to(self.inner.dtype) @ self.inner
        return hidden @ self.outer


def split_model(model: torch.nn.Module, *, parallel_dims: Any, **kwargs: Any) -> torch.nn.Module:
    fully_shard(model, mesh=parallel_dims.get_mesh("dp_shard"))
    return model


class Counting(torch.utils.data.IterableDataset[Any]):
    """Sequences of numbers, counted in threes; it knows where it is."""

    def __init__(self, rank: int, wait_s: float) -> None:
        self.at, self.wait_s = rank, wait_s

    def __iter__(self) -> Iterator[Any]:
        while True:
            time.sleep(self.wait_s)  # as storage takes
            self.at += 2
            tokens = (torch.arange(LENGTH + 1) * 3 + self.at) % VOCABULARY
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class CountingLoader(ParallelAwareDataloader):  # type: ignore[misc]
    """Batches of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        wait_s: float = 0.0

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any) -> None:
        super().__init__(Counting(dp_rank, config.wait_s), dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """Numbers need none."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class StepLines(titan_metrics.MetricsProcessor):  # type: ignore[misc]
    """One line for each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_metrics.MetricsProcessor.Config):  # type: ignore[misc]
        pass

    def log(self, step: int, *args: Any, **kwargs: Any) -> None:
        if torch.distributed.get_rank() == 0:
            print(f"step {step}", flush=True)


def do_without_gpu() -> None:
    """Take away the two questions that TorchTitan asks a GPU: how much memory it has, and whether NCCL is through."""
    nothing = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    none = SimpleNamespace(device_name="", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None)
    titan_metrics.build_device_memory_monitor = lambda: none
    titan_utils.set_pg_timeouts = lambda **_: None


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, values in model.named_parameters():
        assert isinstance(values, DTensor)
        found.update(name.encode() + values.full_tensor().detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="storage of ours; without it, memory alone")
    parser.add_argument("--out", default="results", metavar="DIR", help="TorchTitan's own folder")
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long each example takes to load")
    told = parser.parse_args()
    if not torch.cuda.is_available():
        do_without_gpu()
    model = CountingModel.Config()
    trainer = Trainer.Config(
        model_spec=ModelSpec("counting", "small", model, split_model, None, None, None),
        dump_folder=told.out,
        tokenizer=NoTokenizer.Config(),
        dataloader=CountingLoader.Config(wait_s=told.wait_s),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=LENGTH, steps=told.steps, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(),
        checkpoint=CheckpointManager.Config(enable=True, interval=10, last_save_model_only=False),
        metrics=StepLines.Config(log_freq=1),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
    ).build()
    hold_trainer(trainer, path=told.ckpt)
    trainer.train()
    found = digest(trainer.model_parts[0])
    if torch.distributed.get_rank() == 0:
        print(f"weights sha256: {found}", flush=True)
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    main()
