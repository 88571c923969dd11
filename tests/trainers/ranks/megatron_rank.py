"""A rank of Megatron-Core with its distributed optimizer: it saves, or loads what was saved and tells it whole."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from examples.trainer_megatron import ProcessorForGpu, make_model, train_step
from tests.trainers.ranks.rank_forks import serve


def state_of(model: Any, optimizer: Any, way: str, *, is_loading: bool = False) -> dict[str, Any]:
    weights = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": way}
    place = ((dist.get_world_size(),), (dist.get_rank(),))
    state = {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata),
    }
    return state if is_loading else state | {"random": ShardedObject("random", torch.get_rng_state(), *place)}


def tell(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the whole state of a rank that holds it alone, by the names that Megatron's checkpoints give it."""
    kept = {}
    for one in optimizer.chained_optimizers:
        for values in one.model_param_group_index_map:
            kept[values.data_ptr()] = one._get_main_param_and_optimizer_states(values)
    whole: dict[str, torch.Tensor] = {}
    for sharded in nested_values(model.module.sharded_state_dict()):
        if not isinstance(sharded, ShardedTensor) or sharded.data is None:
            continue
        found = {"model": sharded.data, **kept[sharded.data.data_ptr()]}
        for kind in ("model", "param", "exp_avg", "exp_avg_sq"):
            values = found[kind].detach()
            name = f"{kind} {sharded.key}"
            room = whole.setdefault(name, torch.zeros(sharded.global_shape, dtype=values.dtype))
            room[sharded.global_slice()] = values.reshape(sharded.local_shape)
    return whole


def run_rank(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("meeting", type=Path)
    parser.add_argument("told", type=Path, help="where the state goes")
    parser.add_argument("--way", default="fully_reshardable", help="how the optimizer's state is saved")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    told = parser.parse_args(argv)
    dist.init_process_group("gloo", init_method=f"file://{told.meeting}", rank=told.rank, world_size=told.world)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)
    torch.manual_seed(0)
    model = make_model(True)
    chosen = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-3, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(chosen, [model])
    schedule = OptimizerParamScheduler(optimizer, 0.0, 1e-2, 1e-3, 2, 20, "linear", 0.0, 0.0, 0, "constant")
    if told.load:
        for one in optimizer.chained_optimizers:
            one._init_optimizer_states_with_dummy_values()
            set_states = one._set_main_param_and_optimizer_states
            # Adam of torch has a count of steps for each parameter, which Megatron does not save.
            one._set_main_param_and_optimizer_states = lambda values, found, set_states=set_states: set_states(
                values, {"step": torch.tensor(0.0)} | found
            )
        state = dist_checkpointing.load(state_of(model, optimizer, told.way, is_loading=True), str(told.load))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.save(tell(model, optimizer), told.told)
    else:
        for step in range(3):
            train_step(model, optimizer, schedule, step)
        told.save.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state_of(model, optimizer, told.way), str(told.save))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda values, *_, **__: values  # type: ignore[method-assign]
    with ProcessorForGpu():
        serve(run_rank)
