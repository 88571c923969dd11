"""A small network, trained by DeepSpeed's engine with ZeRO on numbers it makes itself; it survives faults exactly.

    holdfast run --nproc-per-node=2 examples/trainer_deepspeed.py --ckpt DIR

The one line of ours is `hold_engine(engine, path=...)`, after `deepspeed.initialize`. The model has dropout, so equal
weights at the end show that random numbers were restored as well.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

import deepspeed
import torch

from holdfast.trainers.deepspeed import hold_engine

ACCUMULATED, SAVED_EVERY = 2, 10  # batches of one step; steps between DeepSpeed's own checkpoints


def batch_of(number: int, rank: int, wait_s: float) -> torch.Tensor:
    time.sleep(wait_s)  # as storage takes
    return torch.arange(32.0).reshape(4, 8).roll(number * 3 + rank).div(32)


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, values in model.named_parameters():
        found.update(name.encode() + values.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--zero", type=int, default=1, help="stage of ZeRO: 0, 1 or 2")
    parser.add_argument("--bf16", action="store_true", help="weights of 16 bits, and masters of 32")
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="storage of ours; without it, memory alone")
    parser.add_argument("--out", default="results", metavar="DIR", help="where DeepSpeed's own checkpoints go")
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long each batch takes to load")
    told = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": told.zero, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
        "bf16": {"enabled": told.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": told.steps, "warmup_num_steps": 5}},
    }
    if not torch.cuda.is_available():
        # On processors DeepSpeed compiles a collective of its own at the first start; gloo needs no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    hold_engine(engine, own=told.out, path=told.ckpt)
    kind = next(model.parameters()).dtype
    for step in range(engine.global_steps, told.steps):
        for number in range(ACCUMULATED):
            batch = batch_of(step * ACCUMULATED + number, engine.global_rank, told.wait_s).to(engine.device, kind)
            engine.backward(torch.nn.functional.mse_loss(engine(batch), batch))
            engine.step()
        if engine.global_rank == 0:
            print(f"step {engine.global_steps}", flush=True)
        if engine.global_steps % SAVED_EVERY == 0:
            engine.save_checkpoint(told.out)
    if engine.global_rank == 0:
        print(f"weights sha256: {digest(model)}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may add in any order
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    main()
