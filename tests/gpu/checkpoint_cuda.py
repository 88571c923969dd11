"""Snapshots of a state on a GPU, for real: `python -m tests.gpu.checkpoint_cuda [--small]` on a machine that has one.

Correctness first: snapshots taken while the GPU is far behind are whole and of their step, the optimizer waits on the
GPU and not on the processor, and what is restored is bit-exact. Then what it costs for a state of some 8 GB: longer
steps, the processor's time, and a restore.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.checkpoint.arena import Arena
from holdfast.client.checkpointer import Checkpointer
from holdfast.wire import keeping
from tests.client.fake_keeper import FakeKeeper

DEVICE = torch.device("cuda")
BUSY = 20_000_000  # cycles that a queued kernel idles: about 10 ms


class Counting(torch.optim.SGD):
    """Every parameter and all that is kept for it is the number of the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("kept", torch.zeros_like(parameter)).add_(1)
                parameter.copy_(state["kept"])


class Counted(nn.Module):
    """Buffers that change in the forward pass, right behind a snapshot."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(6, size))
        self.small = nn.Parameter(torch.zeros(7))
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("table", torch.zeros(size))
        self.seen: torch.Tensor
        self.table: torch.Tensor

    def forward(self) -> torch.Tensor:
        self.seen.add_(1)
        self.table.add_(1)
        return self.large.sum() + self.small.sum()


def never_torn_never_stale(keeper: FakeKeeper, saves: int) -> dict[str, Any]:
    """The processor queues steps and snapshots as fast as it can; a reader looks at the memory all the while."""
    model = Counted(1 << 20).to(DEVICE)
    optimizer = Counting(model.parameters(), lr=1.0)
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    assert ckpt._snapshots and ckpt._snapshots.side
    arena, images = keeper.arena(), ckpt._snapshots.images
    looked = taken = 0
    for step in range(1, saves + 1):
        if step % 3 == 0:
            torch.cuda._sleep(BUSY)
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        taken += ckpt.save(step)
        looked += look(arena, images)
    ckpt.close()
    looked += look(arena, images)
    newest = arena.sealed()[0].step
    assert newest == saves, f"the newest of {saves} is {newest}"
    return {"saves": taken, "skipped": ckpt.skipped, "snapshots looked at": looked}


def look(arena: Arena, images: list[Any]) -> int:
    """Every tensor of every sealed snapshot holds the number of its step, and nothing else."""
    looked = 0
    for sealed in arena.sealed():
        image = images[sealed.slot]
        found = {}
        for index, item in enumerate(image.layout.items):
            if item.spec.dtype == "float32":
                low, high = image.payloads[index].aminmax()
                found[item.spec.key] = (float(low), float(high))
        if arena.seq(sealed.slot) != sealed.seq:
            continue  # overtaken
        looked += 1
        for key, seen in found.items():
            assert seen == (sealed.step, sealed.step), f"step {sealed.step}: {key} is {seen}"
    return looked


def transformer(layers: int, width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(width, width), nn.TransformerEncoder(layer, layers, enable_nested_tensor=False))


class Training:
    """fp32 parameters and fused AdamW, computing in bf16."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.model = transformer(layers, width).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = torch.randn(max(1, tokens // 512), 512, width, device=DEVICE)
        self.bytes = 3 * sum(parameter.nbytes for parameter in self.model.parameters())

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def bit_exact(keeper: FakeKeeper) -> dict[str, Any]:
    """Train, snapshot, train on; then restore into another model and train it as far."""

    def run(seed: int, resume: bool) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        training = Training(2, 256, 2048)
        schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
        ckpt = Checkpointer(model=training.model, optimizer=training.optimizer, extra={"schedule": schedule})
        start = ckpt.restore()
        assert start == (5 if resume else 0)
        for step in range(start + 1, 10):
            training.step()
            schedule.step()
            if step <= 5:
                ckpt.save(step)
        ckpt.close()
        state = training.optimizer.state
        kept = [tensor for parameter in training.model.parameters() for tensor in state[parameter].values()]
        return [tensor.detach().clone() for tensor in (*training.model.parameters(), *kept)]

    wanted, found = run(0, False), run(1, True)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    return {"tensors compared": len(wanted)}


def waits_on_the_gpu(keeper: FakeKeeper) -> dict[str, Any]:
    """The optimizer's step returns at once although the copies it waits for have not even begun."""
    training = Training(4, 1024, 512)
    ckpt = Checkpointer(model=training.model, optimizer=training.optimizer)
    for step in range(1, 4):
        training.step()
        ckpt.save(step)
    ckpt.close()
    torch.cuda.synchronize()
    torch.cuda._sleep(40 * BUSY)  # the GPU is away
    training.step()
    began = time.perf_counter()
    assert ckpt.save(4)
    saved = time.perf_counter()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    before = time.perf_counter()
    training.optimizer.step()
    stepped = time.perf_counter()
    sealed = [one.step for one in keeper.arena().sealed()]
    assert 4 not in sealed, "the GPU was not away for long enough to show anything"
    ckpt.close()
    assert keeper.arena().sealed()[0].step == 4
    return {"save, ms": 1e3 * (saved - began), "optimizer.step, ms": 1e3 * (stepped - before)}


def timed(work: Callable[[int], None], steps: int, first: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in range(first, first + steps):
        work(step)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def cost(keeper: FakeKeeper, size: tuple[int, int, int], every: int, rounds: int) -> dict[str, Any]:
    """Steps with and without snapshots in turns; medians."""
    training = Training(*size)
    for _ in range(3):
        training.step()
    began = time.perf_counter()
    ckpt = Checkpointer(model=training.model, optimizer=training.optimizer)
    made_s = time.perf_counter() - began
    blocked: list[float] = []
    number = 0

    def plain(_: int) -> None:
        training.step()

    def saving(step: int) -> None:
        nonlocal number
        training.step()
        if step % every == 0:
            number += 1
            began = time.perf_counter()
            ckpt.save(number)
            blocked.append(time.perf_counter() - began)

    bases: list[float] = []
    stalls: list[float] = []
    steps, first_ms = 8, 0.0
    for turn in range(rounds):
        bases.append(timed(plain, steps, 0))
        with_saves = timed(saving, steps, 0)
        ckpt.close()
        bases.append(timed(plain, steps, 0))
        stalls.append(with_saves - statistics.mean(bases[-2:]))
        if turn == 0:
            first_ms = 1e3 * blocked[0]
            blocked.clear()
    side = ckpt._snapshots.side  # type: ignore[union-attr]
    assert side
    shadows = sum([shadow.nbytes for shadow in side._shadows.values()])
    blocked_ms = 1e3 * statistics.median(blocked)
    return priced(statistics.median(bases), statistics.median(stalls[1:]) * every, training.bytes / 1e9, every) | {
        "processor blocked, ms (median)": blocked_ms,
        "processor blocked, ms (first)": first_ms,
        "made in, s": made_s,
        "shadows, % of the state": 100 * shadows / training.bytes,
        "skipped": ckpt.skipped,
        "newest sealed": keeper.arena().sealed()[0].step,
        "saved": number,
    }


def priced(step_s: float, stall_s: float, size_gb: float, every: int) -> dict[str, Any]:
    return {
        "state, GB": size_gb,
        "step, ms": 1e3 * step_s,
        "longer by, %": 100 * stall_s / every / step_s,
        "stall per snapshot, ms": 1e3 * stall_s,
        "stall per GB, ms": 1e3 * stall_s / size_gb,
    }


def restart(keeper: FakeKeeper, size: tuple[int, int, int]) -> dict[str, Any]:
    """From the making of a Checkpointer to the last byte on the GPU, of a state that lies in memory."""
    training = Training(*size)
    training.step()
    ckpt = Checkpointer(model=training.model, optimizer=training.optimizer)
    assert ckpt.save(1)
    ckpt.close()
    wanted = [parameter.detach().clone() for parameter in training.model.parameters()]
    again = Training(*size)
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    ckpt._snapshots.release()  # type: ignore[union-attr]
    torch.cuda.synchronize()
    began = time.perf_counter()
    second = Checkpointer(model=again.model, optimizer=again.optimizer)
    made = time.perf_counter()
    assert second.restore() == 1
    torch.cuda.synchronize()
    done = time.perf_counter()
    assert all(torch.equal(a, b) for a, b in zip(wanted, again.model.parameters(), strict=True))
    return {"state, GB": training.bytes / 1e9, "made in, s": made - began, "restored in, s": done - made}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--small", action="store_true", help="correctness, and a tenth of the state")
    asked.add_argument("--only", default="")
    told = asked.parse_args()
    long = (4, 1024, 8192) if told.small else (13, 2048, 24576)  # 671 M parameters; the copies fit into a step
    short = (4, 1024, 1024) if told.small else (13, 2048, 4096)  # and here they do not
    checks: dict[str, Callable[[FakeKeeper], dict[str, Any]]] = {
        "never torn, never stale": lambda keeper: never_torn_never_stale(keeper, 300 if told.small else 1000),
        "bit-exact": bit_exact,
        "the optimizer waits on the GPU": waits_on_the_gpu,
        "every step, it fits": lambda keeper: cost(keeper, long, 1, 4),
        "every 4th step, it does not fit": lambda keeper: cost(keeper, short, 4, 5),
        "restart from memory": lambda keeper: restart(keeper, long),
    }
    print(
        json.dumps({"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "holdfast": holdfast.__version__})
    )
    for name, check in checks.items():
        if told.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            keeper = FakeKeeper(Path(folder))
            os.environ[keeping.KEEPER] = str(keeper.path)
            began = time.perf_counter()
            found = check(keeper)
            took_s = time.perf_counter() - began
            print(json.dumps({name: found, "took, s": round(took_s, 1)}, default=float), flush=True)
            keeper.close()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
