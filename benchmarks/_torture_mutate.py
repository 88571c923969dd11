"""A rank that spoils its state the moment a save returns, and saves again at once; `promised` tells the last one."""

import argparse
import mmap
from pathlib import Path

import torch

import holdfast

SPOILT = -1
TENSORS, WORDS = 5, 400_000  # of 4 bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--saves", type=int, required=True)
    args = parser.parse_args()
    with (args.folder / "promised").open("w+b") as file:
        file.truncate(4096)
        promised = memoryview(mmap.mmap(file.fileno(), 4096)).cast("q")
    state = {f"t{index}": torch.zeros(WORDS, dtype=torch.int32) for index in range(TENSORS)}
    ckpt = holdfast.Checkpointer(state_dict=state)
    step = ckpt.restore()
    taken = 0
    while taken < args.saves:
        step += 1
        for tensor in state.values():
            tensor.fill_(step)
        if ckpt.save(step):
            taken += 1
            promised[0] = step
        for tensor in state.values():
            tensor.fill_(SPOILT)
        holdfast.step(step)
    promised[1] = step - taken  # saves for which there was no room


if __name__ == "__main__":
    main()
