"""Table 8: a state saved at every step, beside savers that training waits for. Started by byterobust_gpu.py.

    python -m benchmarks._byterobust_savers                   # the savers one after the other, in one process
    holdfast run --nnodes 2 _byterobust_savers.py FILE        # ours, while a peer copies what it can

A saver is timed over steps that save each time, between stretches of steps that do not. The last line is
JSON, or FILE has it.
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import holdfast
from benchmarks._ckpt_state import State
from benchmarks._ckpt_ways import Way, dcp_save, torch_save
from benchmarks.ckpt_gpu import FITS, Training

CALM_STEPS, SETTLED_STEPS = 8, 12
WATCHED_S = 25.0  # of steps beside copies to a peer


class GpuState(State):
    """The transformer of bench-ckpt_gpu, as other savers see it."""

    def __init__(self, training: Training) -> None:
        self.model, self.optimizer = training.model, training.optimizer


class Saver(NamedTuple):
    make: Callable[[GpuState, Path], Way]
    steps: int


def into_memory(state: GpuState, folder: Path) -> Way:
    """As in GEMINI: into pinned memory of the host, while training waits."""
    tensors = list(state.own().values())
    kept = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]

    def save() -> None:
        for tensor, copy in zip(tensors, kept, strict=True):
            copy.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    return Way(save)


def dcp_async_save(state: GpuState, folder: Path) -> Way:
    """One write at a time: the next save waits for the one before."""
    under_way: list[Any] = []

    def settle() -> None:
        if under_way:
            under_way.pop().result()

    def save() -> None:
        settle()
        under_way.append(dcp.async_save(state.own(), checkpoint_id=folder / "async"))

    return Way(save, settle)


def ours(state: GpuState, folder: Path) -> Way:
    checkpointer, numbers = holdfast.Checkpointer(model=state.model, optimizer=state.optimizer), iter(range(1, 10**9))
    return Way(lambda: checkpointer.save(next(numbers)), checkpointer.close)


SAVERS = {
    "torch.save": Saver(torch_save, 2),
    "dcp.save": Saver(dcp_save, 2),
    "dcp.async_save": Saver(dcp_async_save, 3),
    "into memory": Saver(into_memory, 12),
    "holdfast": Saver(ours, 40),
}


def timed(step: Callable[[], object], steps: int, save: Callable[[], object] = lambda: None) -> tuple[float, float]:
    """Seconds of a step, and seconds in which `save` kept it waiting."""
    torch.cuda.synchronize()
    began, blocked_s = time.perf_counter(), list[float]()
    for _ in range(steps):
        at = time.perf_counter()
        save()
        blocked_s.append(time.perf_counter() - at)
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps, statistics.median(blocked_s)


def beside_others() -> dict[str, Any]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    training = Training(*FITS, is_calm=True)
    state, found = GpuState(training), dict[str, Any]()
    timed(training.step, 3)
    for name, (make, steps) in SAVERS.items():
        folder = Path(tempfile.mkdtemp(prefix="holdfast-savers-"))
        try:
            before_s, _ = timed(training.step, CALM_STEPS)
            way = make(state, folder)
            timed(training.step, min(steps, 4), way.save)  # a first save makes ready; ours chooses its ways
            saving_s, blocked_s = timed(training.step, steps, way.save)
            way.settle()
            after_s, _ = timed(training.step, CALM_STEPS)
        except Exception as e:  # another's saver may fail here for reasons of its own
            found[name] = {"failed": f"{type(e).__name__}: {e}"[:300]}
            continue
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        calm_s = (before_s + after_s) / 2
        found[name] = {"step_s": saving_s, "calm_s": calm_s, "blocked_s": blocked_s, "share": calm_s / saving_s}
        print(name, found[name], flush=True)
    return {"gb": training.bytes / 1e9, "savers": found}


def beside_a_peer(out: Path) -> None:
    """One rank trains on the GPU, the other has next to nothing to do; each node keeps a copy of the other's state."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        training = Training(*FITS, is_calm=True)
        model: torch.nn.Module = training.model
        optimizer: torch.optim.Optimizer = training.optimizer
        train = training.step
    else:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        train = optimizer.step
    goes_on = torch.ones(())

    def step() -> None:
        dist.broadcast(goes_on, 0)
        train()

    timed(step, 3)
    calm_s, _ = timed(step, CALM_STEPS)
    checkpointer = holdfast.Checkpointer(model=model, optimizer=optimizer)
    number = checkpointer.restore()
    blocked_s, began, first = list[float](), 0.0, 0
    while goes_on:
        if number == SETTLED_STEPS:
            torch.cuda.synchronize()
            began, first = time.perf_counter(), number
            blocked_s.clear()
        number += 1
        at = time.perf_counter()
        checkpointer.save(number)
        blocked_s.append(time.perf_counter() - at)
        if began and dist.get_rank() == 0 and time.perf_counter() - began > WATCHED_S:
            goes_on.zero_()
        step()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / (number - first)
    if dist.get_rank() == 0:
        found = {
            "step_s": step_s,
            "calm_s": calm_s,
            "blocked_s": statistics.median(blocked_s),
            "share": calm_s / step_s,
        }
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:]:
        beside_a_peer(Path(sys.argv[1]))
    else:
        print(json.dumps(beside_others()))
