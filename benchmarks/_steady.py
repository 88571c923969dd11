"""Steps of a fixed amount of computing, each timed: the same script under plain python and under a launcher.

It computes where a training script would wait for its device, because what a launcher takes away is computing time.
Two of these take turns: each does a step when the token comes, then hands it on.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch


class Steps:
    """A small model and its optimizer, so that whatever hooks a launcher has put there are at work too."""

    def __init__(self, work: int) -> None:
        self.work = work
        self.model = torch.nn.Linear(256, 256)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.inputs = torch.randn(64, 256)

    def step(self) -> float:
        began_at = time.perf_counter()
        for _ in range(self.work):
            self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began_at


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, required=True, help="file for the seconds of each step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--work", type=int, required=True, help="forward and backward passes in each step")
    parser.add_argument("--mine", type=Path, required=True, help="the pipe through which the token comes")
    parser.add_argument("--next", type=Path, required=True, help="the pipe through which it goes on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps, took = Steps(args.work), []
    # Opened for both reading and writing, so that neither end waits for the other to open it.
    mine, onward = os.open(args.mine, os.O_RDWR), os.open(args.next, os.O_RDWR)
    args.to.with_suffix(".pid").write_text(str(os.getpid()))
    for _ in range(args.steps):
        token = os.read(mine, 1)
        took.append(steps.step())
        os.write(onward, token)
    args.to.write_text(json.dumps(took))


if __name__ == "__main__":
    main()
