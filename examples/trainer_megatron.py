"""A small GPT of Megatron-Core with its distributed optimizer, on numbers it counts itself; it survives faults exactly.

    holdfast run --nproc-per-node=2 examples/trainer_megatron.py --ckpt DIR

What is ours: `HeldMegatron` after the optimizer is made, and its `save` after every step; and `newest_checkpoint` for
Megatron's own. The model has dropout, so equal weights at the end show that random numbers were restored as well.
"""

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

import holdfast
from holdfast.trainers.megatron import HeldMegatron, newest_checkpoint

LENGTH, VOCABULARY, SAVED_EVERY = 8, 32, 10


class ProcessorForGpu(TorchFunctionMode):
    """Gives Megatron the processor wherever it asks for a GPU, which it takes for granted."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        is_name = func is torch.Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_name else found


def make_model(bf16: bool) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=not torch.cuda.is_available(),
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    model = model.bfloat16() if bf16 else model
    return DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)


def train_step(model: Any, optimizer: Any, schedule: Any, step: int) -> Any:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    ids = (torch.arange(LENGTH) * 3 + 2 * step + dist.get_rank())[None] % VOCABULARY
    places, hidden = torch.arange(LENGTH)[None], torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool()
    loss = model(ids, places, hidden, labels=ids.roll(-1, 1)).mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    schedule.step(increment=1)
    return loss.detach()


def own_state(model: Any, optimizer: Any, schedule: Any, *, is_loading: bool = False) -> dict[str, Any]:
    """What Megatron's own checkpoints hold here."""
    weights = model.module.sharded_state_dict()
    way = {"distrib_optim_sharding_type": "dp_reshardable"}
    place = ((dist.get_world_size(),), (dist.get_rank(),))
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=way),
        "schedule": schedule.state_dict(),
        "random": ShardedObject("random", torch.get_rng_state(), *place),
    }


def load_own(found: str, model: Any, optimizer: Any, schedule: Any) -> None:
    for one in optimizer.chained_optimizers:
        one._init_optimizer_states_with_dummy_values()  # Adam of torch has no state yet, which Megatron needs here
    state = dist_checkpointing.load(own_state(model, optimizer, schedule, is_loading=True), found)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for weights in group["params"]:  # Megatron has given Adam of torch one count for all, of the first step
                one.optimizer.state[weights]["step"] = torch.tensor(float(group["step"]))
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"])


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, values in model.named_parameters():
        found.update(name.encode() + values.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bf16", action="store_true", help="weights of 16 bits, and masters of 32")
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="storage of ours; without it, memory alone")
    parser.add_argument(
        "--out", type=Path, default=Path("results"), metavar="DIR", help="for Megatron's own checkpoints"
    )
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long each batch takes to load")
    told = parser.parse_args()
    dist.init_process_group()
    parallel_state.initialize_model_parallel()
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(0)
    else:
        initialize_rng_tracker(inference_rng_tracker=True)  # random numbers of the processor are not kept apart
    torch.manual_seed(0)
    model = make_model(told.bf16)
    torch.manual_seed(dist.get_rank())
    rates = {"lr": 1e-2, "min_lr": 1e-3}
    chosen = OptimizerConfig(optimizer="adam", **rates, bf16=told.bf16, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(chosen, [model])
    schedule = OptimizerParamScheduler(optimizer, 0.0, 1e-2, 1e-3, 2, told.steps, "linear", 0.0, 0.0, 0, "constant")
    held = HeldMegatron([model], optimizer, schedule, path=told.ckpt)
    if not held.step and (found := newest_checkpoint(told.out)):
        load_own(found.path, model, optimizer, schedule)
        held.step = found.step
    for step in range(held.step + 1, told.steps + 1):
        time.sleep(told.wait_s)  # as storage takes
        held.save(step, loss=train_step(model, optimizer, schedule, step))
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)
        if step % SAVED_EVERY == 0:
            folder = told.out / f"iter_{step:07d}"
            folder.mkdir(parents=True, exist_ok=True)
            with holdfast.phase("save"):
                dist_checkpointing.save(own_state(model, optimizer, schedule), str(folder))
    if dist.get_rank() == 0:
        print(f"weights sha256: {digest(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available():
        main()
    else:
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *_: None
        with ProcessorForGpu():
            main()
