"""The small DDP job that every way of `make bench-elastic` trains: its model, its step, and what each rank writes."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, BATCH, STEP_S = 256, 8, 0.02


class Notes:
    """The file in which one process writes what it did, and when."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def note_step(self, generation: int, rank: int) -> None:
        """Write that a step is made, in groups of this number (1 or more, rising); then rest, as all ways do."""
        self._write(f"step in {generation}", generation, rank)
        time.sleep(STEP_S)

    def note_spare(self, rank: int) -> None:
        """Write that this process stands by for a seat."""
        self._write("spare", 0, rank)

    def _write(self, kind: str, generation: int, rank: int) -> None:
        told = {"at": time.time(), "kind": kind, "pid": os.getpid(), "rank": rank, "generation": generation}
        self._file.write(json.dumps(told) + "\n")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--ckpt", type=Path)
    parser.add_argument("--seats", type=int, default=4)
    return parser.parse_args()


def build_model() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def make_loss(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(BATCH, WIDTH)).square().mean()
    return loss
