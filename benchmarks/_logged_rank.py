"""A script that imports nothing of ours and logs its losses by one real package: a leap, and later no numbers at all.

Its second generation logs sound losses and ends by itself.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

STEP_S = 0.03
LEAP, BAD, LAST, LAST_AGAIN = 40, 80, 2000, 60


def loss_of(step: int) -> float:
    """What a package gets as the loss of a step."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return float("nan") if first and step >= BAD else 200.0 if step == LEAP else 2.0 + step % 7 / 100


def last_step() -> int:
    return LAST if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else LAST_AGAIN


def log_by_hand(log: Callable[[int, float], object]) -> None:
    """A plain loop, whose steps are those of its optimizer."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    for step in range(1, last_step() + 1):
        time.sleep(STEP_S)
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        log(step, loss_of(step))


def run_wandb(folder: str) -> None:
    import wandb

    run = wandb.init(project="p", dir=folder, mode="offline")
    log_by_hand(lambda step, loss: run.log({"train/loss": loss}, step=step))
    run.finish()


def run_mlflow(folder: str) -> None:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.start_run()
    log_by_hand(lambda step, loss: mlflow.log_metric("train/loss", loss, step=step))
    mlflow.end_run()


def run_tensorboard(folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(f"{folder}/board")
    log_by_hand(lambda step, loss: board.add_scalar("train/loss", loss, step))
    board.close()


class Told(torch.nn.Module):
    """A model whose loss is what is to be logged; each forward is a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.step = 0

    def forward(self, x: torch.Tensor, **others: object) -> dict[str, torch.Tensor]:
        time.sleep(STEP_S)
        self.step += 1
        return {"loss": self.net(x).mean() * 0.0 + loss_of(self.step)}


def run_lightning(folder: str) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.told = Told()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.told(batch)["loss"]
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    from lightning.pytorch.loggers import CSVLogger

    trainer = lightning.Trainer(
        max_steps=last_step(),
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    loader: Any = torch.utils.data.DataLoader([torch.ones(2)] * LAST, batch_size=1)  # type: ignore[arg-type]
    trainer.fit(Module(), loader)


def run_transformers(folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=folder,
        max_steps=last_step(),
        per_device_train_batch_size=1,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=Told(), args=args, train_dataset=[{"x": torch.ones(2)}] * LAST).train()


RUNS = {
    "wandb": run_wandb,
    "mlflow": run_mlflow,
    "tensorboard": run_tensorboard,
    "lightning": run_lightning,
    "transformers": run_transformers,
}

if __name__ == "__main__":
    RUNS[sys.argv[1]](sys.argv[2])
