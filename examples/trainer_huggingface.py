"""A small GPT-2, trained by the Trainer of transformers on numbers it counts itself; it survives faults exactly.

    holdfast run --nproc-per-node=2 examples/trainer_huggingface.py --ckpt DIR

The one line of ours is `train(trainer, path=...)`, where others write `trainer.train()`. The model has dropout, and an
evaluation draws random numbers too, so equal weights at the end show that these were restored as well.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast.trainers.huggingface import train


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Each is another sequence of numbers, counted in threes."""

    def __init__(self, count: int, wait_s: float) -> None:
        self.count, self.wait_s = count, wait_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.wait_s)  # as storage takes
        ids = (torch.arange(8) * 3 + index) % 32
        return {"input_ids": ids, "labels": ids}


class StepLines(TrainerCallback):  # type: ignore[misc]  # of a library that may be missing
    """One line for each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            print(f"step {state.global_step}", flush=True)


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, values in model.named_parameters():
        found.update(name.encode() + values.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="storage of ours; without it, memory alone")
    parser.add_argument("--out", default="results", metavar="DIR", help="the Trainer's own output directory")
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long each example takes to load")
    told = parser.parse_args()
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=told.out,
        max_steps=told.steps,
        save_steps=10,
        eval_strategy="steps",
        eval_steps=7,
        logging_steps=5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=Sentences(90, told.wait_s),
        eval_dataset=Sentences(8, 0.0),
        callbacks=[StepLines()],
    )
    train(trainer, path=told.ckpt)
    if trainer.is_world_process_zero():
        print(f"weights sha256: {digest(trainer.model)}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may add in any order
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    main()
