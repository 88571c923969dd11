"""A small network, trained by a loop on Accelerate on numbers it makes itself; it survives faults exactly.

    holdfast run --nproc-per-node=2 examples/trainer_accelerate.py --ckpt DIR

What is ours: `HeldTraining` after `prepare`, and its epochs and batches in the two loops. The model has dropout, so
equal weights at the end show that random numbers were restored as well.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

from holdfast.trainers.accelerate import HeldTraining

ACCUMULATED = 2  # batches of one step


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of one number each."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)  # as storage takes
        return torch.full((8,), index / len(self))


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, values in model.named_parameters():
        found.update(name.encode() + values.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=48, help="as many epochs as have so many steps")
    parser.add_argument("--ckpt", type=Path, metavar="DIR", help="storage of ours; without it, memory alone")
    parser.add_argument("--out", default="results", metavar="DIR", help="Accelerate's own project directory")
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long each row takes to load")
    told = parser.parse_args()
    project = ProjectConfiguration(project_dir=told.out, automatic_checkpoint_naming=True)
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=ACCUMULATED, project_config=project)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, told.steps)
    loader = torch.utils.data.DataLoader(Numbers(told.wait_s), batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    training = HeldTraining(accelerator, model=model, optimizer=optimizer, extra={"schedule": schedule}, path=told.ckpt)
    for epoch in training.epochs(told.steps * ACCUMULATED // len(loader)):
        for batch in training.batches(loader):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), batch)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.print(f"step {training.step + 1}", flush=True)
            if accelerator.sync_gradients and training.step % 10 == 9:
                accelerator.save_state()
        accelerator.print(f"epoch {epoch} is over", flush=True)
    accelerator.print(f"weights sha256: {digest(model)}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    main()
