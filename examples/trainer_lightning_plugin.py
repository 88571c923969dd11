"""A script that resumes by Lightning's own `ckpt_path="last"`, and what makes that safe; it survives faults exactly.

    holdfast run --nproc-per-node=2 examples/trainer_lightning_plugin.py

What is ours: `HoldfastPlugin` among the plugins. It verifies Lightning's checkpoints and takes the newest whole one.
The callback is a choice: with it a job resumes from the last step, without it (--own-only) from the last checkpoint.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from holdfast.trainers.lightning import HoldfastCallback, HoldfastPlugin

ROWS, ACCUMULATED = 96, 2  # and how many batches make one step


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of one number each."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)  # as storage takes
        return torch.full((8,), index / ROWS)


class AutoEncoder(lightning.LightningModule):  # type: ignore[misc]  # of a library that may be missing
    """Eight numbers through three."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Dropout(dropout), torch.nn.ReLU(), torch.nn.Linear(32, 8)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch), batch)

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx % ACCUMULATED:
            self.print(f"step {self.global_step}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, values in model.named_parameters():
        found.update(name.encode() + values.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=48, help="as many epochs as have so many steps")
    parser.add_argument("--own-only", action="store_true", help="only Lightning's own checkpoints, and no dropout")
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="storage of ours; without it, memory alone")
    parser.add_argument("--out", default="results", metavar="DIR", help="where Lightning's own checkpoints go")
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long each row takes to load")
    told = parser.parse_args()
    lightning.seed_everything(0)
    saver = ModelCheckpoint(dirpath=told.out, filename="{step}", save_top_k=-1, save_last=True)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=told.steps * ACCUMULATED * 4 * ranks // ROWS,
        accumulate_grad_batches=ACCUMULATED,
        plugins=[HoldfastPlugin(told.out)],
        callbacks=[saver] if told.own_only else [HoldfastCallback(path=told.ckpt), saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = AutoEncoder(0.0 if told.own_only else 0.1)
    loader = torch.utils.data.DataLoader(Numbers(told.wait_s), batch_size=4, shuffle=True)
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        print(f"weights sha256: {digest(model)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    main()
