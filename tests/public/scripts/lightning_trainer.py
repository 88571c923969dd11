"""A Trainer of Lightning that goes on from last.ckpt, if there is one."""

import os
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        time.sleep(0.1 if os.path.exists("busy") else 0.01)  # as storage that others use, too
        return torch.full((8,), index / 80)


class AutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.ReLU(), torch.nn.Linear(3, 8))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch), batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.print(f"step {self.global_step}: loss {outputs['loss'].item():.6f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    L.seed_everything(0)
    saver = ModelCheckpoint(dirpath="checkpoints", save_last=True, every_n_epochs=1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=6,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True)
    last = "checkpoints/last.ckpt"
    trainer.fit(AutoEncoder(), loader, ckpt_path=last if os.path.exists(last) else None)


if __name__ == "__main__":
    main()
