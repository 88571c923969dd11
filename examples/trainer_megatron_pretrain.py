"""The `pretrain` of Megatron-LM, on tokens that Megatron makes up; it survives faults exactly.

    PYTHONPATH=MEGATRON_LM holdfast run --nproc-per-node=2 examples/trainer_megatron_pretrain.py --ckpt DIR

What is ours: `hold_pretrain` before `pretrain`. The rest is what Megatron-LM's own scripts do, and the words that they
would be started with. The model has dropout, so equal weights at the end show that random numbers were restored too.
"""

import argparse
import contextlib
import hashlib
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.legacy import fused_kernels
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from torch.overrides import TorchFunctionMode

from holdfast.trainers.megatron_pretrain import hold_pretrain

LENGTH = 16
WORDS = f"""
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --min-lr 1e-3 --weight-decay 0.01 --clip-grad 1.0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --num-workers 0 --log-interval 1
    --eval-interval 10 --eval-iters 1 --save-interval 10 --ckpt-format torch_dist --use-distributed-optimizer
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --disable-bias-linear
""".split()
ON_PROCESSOR = "--distributed-backend gloo --use-cpu-initialization --inference-rng-tracker".split()


class ProcessorInPlace(TorchFunctionMode):
    """Gives Megatron the processor wherever it asks for a GPU, which it takes for granted."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        is_name = func is torch.Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_name else found


class Played:
    """A stream or an event of a GPU, where there is none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def play_gpu() -> None:
    """Give Megatron, which asks for a GPU everywhere, the processor's answers."""
    traits = SimpleNamespace(major=8, minor=0, multi_processor_count=1, name="", total_memory=1 << 30)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: "cpu",
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: traits,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "stream": lambda *_: contextlib.nullcontext(),
        **dict.fromkeys(("current_stream", "default_stream", "Stream", "Event"), Played),
        **dict.fromkeys(("set_device", "set_stream", "synchronize", "empty_cache"), lambda *_: None),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    fused_kernels.load = lambda told: None  # it asks CUDA's compiler for its version
    torch.compiler.set_stance("force_eager")  # what is played cannot be compiled


class Run:
    """What Megatron's `pretrain` asks a script for."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._begun = -1  # the steps that were done when the current one began
        self.model: Any = None

    def make_datasets(self, counts: list[int]) -> Any:
        told = get_args()
        config = GPTDatasetConfig(
            random_seed=told.seed,
            sequence_length=LENGTH,
            blend=None,
            split="90,5,5",
            tokenizer=get_tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        return BlendedMegatronDatasetBuilder(MockGPTDataset, counts, lambda: True, config).build()

    def make_model(self, pre_process: bool = True, post_process: bool = True, **more: Any) -> GPTModel:
        told = get_args()
        config = core_transformer_config_from_args(told)
        places = {"vocab_size": told.padded_vocab_size, "max_sequence_length": LENGTH}
        return GPTModel(
            config, get_gpt_layer_local_spec(), **places, pre_process=pre_process, post_process=post_process
        )

    def forward(self, batches: Any, model: Any) -> Any:
        self._tell_step(model)
        batch = next(batches)
        told = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
        return model(*told, labels=batch["labels"]), partial(self._sum_losses, batch["loss_mask"])

    def _tell_step(self, model: Any) -> None:
        if not model.training:
            return
        self.model = model
        done = get_args().curr_iteration
        if done == self._begun:  # another microbatch of this step
            return
        if self._begun >= 0 and dist.get_rank() == 0:
            print(f"step {done}", flush=True)
        self._begun = done
        time.sleep(self._wait_s)  # as storage takes

    @staticmethod
    def _sum_losses(mask: torch.Tensor, losses: torch.Tensor) -> Any:
        total, tokens = (losses.float().view(-1) * mask.view(-1)).sum(), mask.sum().int()
        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="storage of ours; without it, memory alone")
    parser.add_argument(
        "--out", type=Path, default=Path("results"), metavar="DIR", help="for Megatron's own checkpoints"
    )
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long each batch takes to load")
    told, more = parser.parse_known_args()
    own = ["--train-iters", str(told.steps), "--save", str(told.out), "--load", str(told.out)]
    sys.argv = [sys.argv[0], *WORDS, *own, *([] if dist.is_nccl_available() else ON_PROCESSOR), *more]
    run = Run(told.wait_s)
    run.make_datasets.__func__.is_distributed = True  # type: ignore[attr-defined]
    hold_pretrain(path=told.ckpt)
    pretrain(run.make_datasets, run.make_model, ModelType.encoder_or_decoder, run.forward)
    if dist.get_rank() == 0:
        print(f"step {told.steps}", flush=True)
        print(f"weights sha256: {digest(run.model)}", flush=True)
    parallel_state.destroy_model_parallel()


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, values in model.named_parameters():
        found.update(name.encode() + values.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available():
        main()
    else:
        play_gpu()
        with ProcessorInPlace():
            main()
