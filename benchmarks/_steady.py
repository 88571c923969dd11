"""Steps of a fixed amount of computing, each timed: the same script under plain python and under a launcher.

It computes where a training script would wait for its device, because what a launcher takes away is computing time.
"""

import argparse
import json
import time
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--to", type=Path, required=True, help="file for the seconds of each step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--work", type=int, required=True, help="forward and backward passes in each step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(64, 256)
    took = []
    for _ in range(args.steps):
        began_at = time.perf_counter()
        for _ in range(args.work):
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - began_at)
    args.to.write_text(json.dumps(took))


if __name__ == "__main__":
    main()
