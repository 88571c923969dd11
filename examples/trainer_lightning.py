"""A small network, trained by the Trainer of Lightning on numbers it makes itself; it survives faults exactly.

    holdfast run --nproc-per-node=2 examples/trainer_lightning.py --ckpt DIR

What is ours: `HoldfastCallback` among the callbacks, and its `newest_checkpoint` for Lightning's own. The model has
dropout, so equal weights at the end show that random numbers were restored as well.
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

from holdfast.trainers.lightning import HoldfastCallback

ROWS, ACCUMULATED = 96, 2  # and how many batches make one step


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of one number each."""

    def __init__(self, count: int, wait_s: float) -> None:
        self.count, self.wait_s = count, wait_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)  # as storage takes
        return torch.full((8,), index / len(self))


class AutoEncoder(lightning.LightningModule):  # type: ignore[misc]  # of a library that may be missing
    """Eight numbers through three."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 8)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch), batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("error", torch.nn.functional.mse_loss(self.net(batch), batch), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx % ACCUMULATED:
            self.print(f"step {self.global_step}", flush=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, values in model.named_parameters():
        found.update(name.encode() + values.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=48, help="as many epochs as have so many steps")
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="storage of ours; without it, memory alone")
    parser.add_argument("--out", default="results", metavar="DIR", help="where Lightning's own checkpoints go")
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long each row takes to load")
    told = parser.parse_args()
    lightning.seed_everything(0)
    saver = ModelCheckpoint(dirpath=told.out, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    callback = HoldfastCallback(path=told.ckpt)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=told.steps * ACCUMULATED * 4 * ranks // ROWS,
        accumulate_grad_batches=ACCUMULATED,
        val_check_interval=5,
        callbacks=[callback, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = AutoEncoder(told.steps)
    loader = torch.utils.data.DataLoader(Numbers(ROWS, told.wait_s), batch_size=4, shuffle=True)
    checked = torch.utils.data.DataLoader(Numbers(8, 0.0), batch_size=4)
    trainer.fit(model, loader, checked, ckpt_path=callback.newest_checkpoint(told.out))
    if trainer.is_global_zero:
        print(f"weights sha256: {digest(model)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    main()
