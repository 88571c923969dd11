"""A rank that trains with DeepSpeed's ZeRO: on its own, it saves, or goes on from what was saved; it tells its state.

Every rank gets the same batch, so each number of ranks that is a power of two makes the same steps, bit for bit.
"""

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tests.trainers.ranks.rank_forks import serve

KINDS = ("exp_avg", "exp_avg_sq")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(7, 5))
        self.batches: torch.Tensor
        self.register_buffer("batches", torch.zeros(3))
        self.frozen = torch.nn.Linear(5, 5)
        self.one, self.two = torch.nn.Linear(5, 3), torch.nn.Linear(3, 7, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, batch: Any) -> Any:
        self.batches += 1
        return self.two(self.one(self.frozen(batch @ self.embed)).relu())


def make_engine(told: argparse.Namespace, world: int) -> Any:
    torch.manual_seed(0)
    model = Net()
    trained = {name: values for name, values in model.named_parameters() if values.requires_grad}
    groups = [
        {"params": [values for name, values in trained.items() if "weight" in name or name == "embed"]},
        {"params": [values for name, values in trained.items() if "bias" in name], "weight_decay": 0.0},
    ]
    zero = {"stage": told.stage, "round_robin_gradients": told.in_turns, "sub_group_size": 20}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero | ({"parameter_alignment": True} if told.aligned else {}),
        "bf16": {"enabled": told.bf16},
        "data_types": {"grad_accum_dtype": "fp32"} if told.fp32_grads else {},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 5}},
        "checkpoint": {"load_universal": told.universal},
    }
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def make_step(engine: Any, step: int) -> None:
    batch = torch.arange(28.0).reshape(4, 7).roll(step).div(28).to(next(engine.module.parameters()).dtype)
    engine.backward((engine(batch) - batch).square().mean())
    engine.step()


def tell(engine: Any, is_in_turns: bool) -> dict[str, Any]:
    """Return the whole state, which all ranks gather."""
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # or DeepSpeed knows the first group's state alone
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    named = [(name, values) for name, values in engine.module.named_parameters() if values.requires_grad]
    if is_in_turns:
        # DeepSpeed gathers the state by the optimizer's order, in which it is not then.
        return {f"weights {name}": values.detach().clone() for name, values in named} | {"steps": engine.global_steps}
    whole = {f"fp32 {name}": safe_get_full_fp32_param(values) for name, values in named}
    for kind in KINDS:
        whole |= {f"{kind} {name}": safe_get_full_optimizer_state(values, kind) for name, values in named}
    counts = {"steps": engine.global_steps, "lr": engine.get_lr()}
    buffers = {f"buffer {name}": values.clone() for name, values in engine.module.named_buffers()}
    return {name: values.clone() for name, values in whole.items()} | buffers | counts


def run_rank(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("meeting", type=Path)
    parser.add_argument("told", type=Path, help="where the states go")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp32-grads", action="store_true", help="with bf16 and stage 1: BF16_Optimizer")
    parser.add_argument("--in-turns", action="store_true", help="round_robin_gradients")
    parser.add_argument("--aligned", action="store_true", help="parameter_alignment, which is newer than the rest")
    parser.add_argument("--universal", action="store_true", help="the folder to load is a Universal Checkpoint")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    told = parser.parse_args(argv)
    dist.init_process_group("gloo", init_method=f"file://{told.meeting}", rank=told.rank, world_size=told.world)
    engine = make_engine(told, told.world)
    if told.load:
        path, _ = engine.load_checkpoint(told.load.parent, tag=told.load.name)
        assert path, "nothing was loaded"
    else:
        for step in range(3):
            make_step(engine, step)
    states = {"before": tell(engine, told.in_turns)}
    if told.save:
        engine.save_checkpoint(told.save)
    make_step(engine, 3)
    states["after"] = tell(engine, told.in_turns)
    if told.rank == 0:
        torch.save(states, told.told)
    engine.destroy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(run_rank)
