"""Loading 20,000 small tensors by our reader, beside torch's own reader of what torch wrote. Sides take turns."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from benchmarks._ckpt_io import Sides, timed
from benchmarks._report import FULL
from holdfast.checkpoint.dcp import Reader, Writer

TENSORS = 20_000
ROUNDS = 11 if FULL else 6  # the first is not counted
OURS, TORCH = "small tensors: Reader", "small tensors: FileSystemReader"


def measure(folder: Path) -> Sides:
    """Seconds of each load, which starts with an empty reader and ends with every tensor compared, unmeasured."""
    state = {f"layer{n}": torch.full((n % 7 + 1,), float(n)) for n in range(TENSORS)}
    ours, theirs = folder / "small-ours", folder / "small-torch"
    dcp.save(state, storage_writer=Writer(ours), no_dist=True)
    dcp.save(state, storage_writer=FileSystemWriter(theirs), no_dist=True)
    sides: Sides = {OURS: [], TORCH: []}
    for number in range(ROUNDS):
        for side in sorted(sides, reverse=bool(number % 2)):
            found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            took_s = timed(lambda where=ours if side == OURS else theirs, into=found: _load(where, into))  # type: ignore[misc]
            if not all(torch.equal(found[name], tensor) for name, tensor in state.items()):
                raise RuntimeError(f"{side} has loaded something else")
            if number:
                sides[side].append(took_s)
    return sides


def _load(where: Path, into: dict[str, Any]) -> None:
    reader = FileSystemReader(where) if where.name == "small-torch" else Reader(where)
    dcp.load(into, storage_reader=reader, no_dist=True)
