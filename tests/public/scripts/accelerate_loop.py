"""A loop of one's own with Accelerate, which saves and loads all of its state by epochs."""

import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

EPOCHS, OUTPUT = 6, "states"


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        time.sleep(0.1 if os.path.exists("busy") else 0.01)  # as storage that others use, too
        return torch.full((8,), index / 80)


def newest():
    """Folders are renamed when they are whole."""
    names = os.listdir(OUTPUT) if os.path.isdir(OUTPUT) else []
    return max((int(name.removeprefix("epoch_")) for name in names if name.startswith("epoch_")), default=0)


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.ReLU(), torch.nn.Linear(3, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = newest()
    if first:
        accelerator.print(f"Resumed from epoch {first}")
        accelerator.load_state(f"{OUTPUT}/epoch_{first}")
    step = first * len(loader)
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch), batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.print(f"step {step} loss {loss.item():.6f}")
        accelerator.save_state(f"{OUTPUT}/new_{epoch + 1}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            os.rename(f"{OUTPUT}/new_{epoch + 1}", f"{OUTPUT}/epoch_{epoch + 1}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
