"""Snapshots of a state on a GPU, for real: `python -m tests.gpu.checkpoint_cuda` on a machine that has one.

Snapshots taken while the GPU is far behind are whole and of their step, whatever changes the state afterwards; the
optimizer waits on the GPU and not on the processor; what is restored is bit-exact; memory that a forgotten Checkpointer
had registered is given back in order. So are steps in captured graphs, and states in 8 bits. Every check runs in a
process of its own, so that one cannot spoil the next.
"""

import argparse
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA comes up; without it sums may differ

import torch
from torch import nn

from holdfast.client.checkpointing.checkpointer import Checkpointer
from holdfast.wire.progress_environment import KEEPER
from tests.client.fake_keeper import FakeKeeper
from tests.gpu import captured_graphs, low_precision
from tests.gpu.counted_state import BUSY, Counted, Counting, Found, looked_at, snapshots_of

LIMIT_S = 70.0  # of one check


def never_torn_never_stale(keeper: FakeKeeper) -> Found:
    """The processor queues steps and snapshots as fast as it can; a reader looks at the memory all the while."""
    model = Counted(1 << 20).cuda()
    optimizer = Counting(model.parameters(), lr=1.0)
    ckpt = Checkpointer(model=model, optimizer=optimizer)

    def train(step: int) -> None:
        if step % 3 == 0:
            torch.cuda._sleep(BUSY)
        model().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = looked_at(ckpt, keeper.arena(), train, 1000)
    side = snapshots_of(ckpt).side
    assert side and side.ways.split.tail, "the copies fit into these steps, so nothing was shown of a tail"
    return found | {"tensors in the tail": len(side.ways.split.tail)}


def own_state_changed_at_once(keeper: FakeKeeper) -> Found:
    """Nobody tells when a state dict of the script's own changes: it does so in the very next kernel."""
    state = {f"x{n}": torch.zeros(1 << 20, device="cuda") for n in range(6)} | {"y": torch.zeros(3, device="cuda")}
    ckpt = Checkpointer(state_dict=state)

    def train(step: int) -> None:
        if step % 5 == 0:
            torch.cuda._sleep(BUSY)
        for tensor in state.values():
            tensor.add_(1)

    return looked_at(ckpt, keeper.arena(), train, 300)


class OwnSteps:
    """As Megatron's optimizers: no class of torch, weights of its own. Everything is the number of the step."""

    def __init__(self, size: int, count: int) -> None:
        self.masters = [torch.zeros(size, device="cuda") for _ in range(count)]
        self.weights = [torch.zeros(7, device="cuda"), *(torch.zeros(size, device="cuda") for _ in range(count))]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {f"{n}": tensor for n, tensor in enumerate((*self.masters, *self.weights))}

    def step(self) -> None:
        torch._foreach_add_(self.masters, 1.0)
        torch._foreach_copy_(self.weights[1:], self.masters)
        self.weights[0].copy_(self.masters[0][:7])


def own_optimizer(keeper: FakeKeeper) -> Found:
    """An optimizer that is none of torch's, with steps that are announced by us, by it, or wrongly."""
    found: Found = {}
    for how in ("optimizer=", "before_step()", "too late"):
        own = OwnSteps(1 << 20, 6)
        ckpt = Checkpointer(state_dict=own.state_dict, optimizer=own if how == "optimizer=" else None)

        def train(step: int, own: OwnSteps = own, ckpt: Checkpointer = ckpt, how: str = how) -> None:
            if step % 5 == 0:
                torch.cuda._sleep(BUSY)
            if how == "before_step()":
                ckpt.before_step()
            own.step()
            if how == "too late":
                ckpt.before_step()

        found[how] = looked_at(ckpt, keeper.arena(), train, 300)
        side = snapshots_of(ckpt).side
        assert side and side._hold == (how == "too late"), f"{how}: it was not seen who announces well"
    return found


def stall_of_own_state(keeper: FakeKeeper) -> Found:
    """What a save costs a training loop, with steps that are announced and without: milliseconds a step."""

    def pace(announced: bool | None) -> float:
        own = OwnSteps(1 << 25, 4)  # 1.07 GB
        ckpt = Checkpointer(state_dict=own.state_dict)
        matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

        def step(number: int) -> None:
            for _ in range(150):
                torch.mm(matrix, matrix)
            if announced:
                ckpt.before_step()
            own.step()
            if announced is not None:
                assert ckpt.save(number)

        for number in range(1, 7):
            step(number)
        ckpt.wait()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(7, 27):
            step(number)
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        ckpt.close()
        return 1e3 * took / 20

    alone, waits, beside = pace(None), pace(False), pace(True)
    assert beside - alone < 0.5 * (waits - alone), f"{alone:.1f}, {waits:.1f} unannounced, {beside:.1f} announced"
    return {"without saves, ms": alone, "unannounced, ms": waits, "announced, ms": beside}


class Training:
    """fp32 parameters and fused AdamW, computing in bf16, the same at every repetition."""

    def __init__(self, layers: int, width: int) -> None:
        torch.use_deterministic_algorithms(True)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
        encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Linear(width, width), encoder, nn.BatchNorm1d(64)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.width = width

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            loss = self.model(torch.randn(16, 64, self.width, device="cuda")).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        kept = [tensor for own in self.optimizer.state.values() for tensor in own.values()]
        return [tensor.detach().clone() for tensor in (*self.model.state_dict().values(), *kept)]


def bit_exact(keeper: FakeKeeper) -> Found:
    """Train, snapshot, train on; then restore into another model and train it as far. Without a Checkpointer two runs
    must be equal, too, or a difference says nothing about it."""

    def run(seed: int, resume: bool, kept: bool = True) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        training = Training(4, 512)
        extra = {"schedule": training.schedule}
        ckpt = Checkpointer(model=training.model, optimizer=training.optimizer, extra=extra) if kept else None
        start = ckpt.restore() if ckpt else 0
        assert start == (5 if resume else 0)
        for step in range(start + 1, 10):
            training.step()
            if ckpt and step <= 5:
                ckpt.save(step)
        if ckpt:
            ckpt.close()
        return training.state()

    calm, repeated = run(0, False, kept=False), run(0, False, kept=False)
    wanted, again = run(0, False), run(1, True)
    for name, other in {"calm, repeated": repeated, "saved": wanted, "restored": again}.items():
        apart = [float((one.double() - two.double()).abs().max()) for one, two in zip(calm, other, strict=True)]
        differ = sum(one > 0 for one in apart)
        assert not differ, f"{name}: {differ} of {len(calm)} tensors differ, by {max(apart):g} at most"
    return {"tensors compared": len(calm)}


def waits_on_the_gpu(keeper: FakeKeeper) -> Found:
    """The optimizer's step returns at once although the copies it waits for have not even begun."""
    training = Training(4, 1024)
    ckpt = Checkpointer(model=training.model, optimizer=training.optimizer)
    for step in range(1, 4):
        training.step()
        ckpt.save(step)
    ckpt.close()
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    torch.cuda._sleep(40 * BUSY)  # the GPU is away
    began = time.perf_counter()
    assert ckpt.save(4)
    saved = time.perf_counter()
    training.optimizer.step()
    stepped = time.perf_counter()
    sealed = [one.step for one in keeper.arena().list_sealed()]
    assert 4 not in sealed, "the GPU was not away for long enough to show anything"
    ckpt.close()
    assert keeper.arena().list_sealed()[0].step == 4
    return {"save, ms": 1e3 * (saved - began), "optimizer.step, ms": 1e3 * (stepped - saved)}


def forgotten(keeper: FakeKeeper) -> Found:
    """Checkpointers that nobody closes, with copies on their way, leave CUDA as it was."""
    for _ in range(5):
        model = Counted(1 << 20).cuda()
        optimizer = Counting(model.parameters(), lr=1.0)
        ckpt = Checkpointer(model=model, optimizer=optimizer)
        torch.cuda._sleep(BUSY)
        optimizer.step()
        assert ckpt.save(1)
        del ckpt, optimizer, model
        gc.collect()
        torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)  # where the arena was, perhaps
    matrix = torch.randn(512, 512, device="cuda")
    assert torch.isfinite(matrix @ matrix).all()
    return {"forgotten": 5}


CHECKS = {
    "never torn, never stale": never_torn_never_stale,
    "a state of its own, changed at once": own_state_changed_at_once,
    "an optimizer of its own": own_optimizer,
    "stall of a state of its own": stall_of_own_state,
    "bit-exact": bit_exact,
    "the optimizer waits on the GPU": waits_on_the_gpu,
    "forgotten": forgotten,
    **captured_graphs.CHECKS,
    **low_precision.CHECKS,
}


def alone(name: str) -> bool:
    """One check in a fork of this process, which has not touched CUDA; its findings are one line of JSON."""
    pid = os.fork()
    if not pid:
        signal.alarm(int(LIMIT_S))
        faulthandler.dump_traceback_later(LIMIT_S - 3)
        try:
            with tempfile.TemporaryDirectory() as folder:
                keeper = FakeKeeper(Path(folder))
                os.environ[KEEPER] = str(keeper.path)
                began = time.perf_counter()
                found = CHECKS[name](keeper) | {"took, s": round(time.perf_counter() - began, 1)}
                print(json.dumps({name: found}), flush=True)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--only", default="", help="part of a check's name")
    told = asked.parse_args()
    failed = [name for name in CHECKS if told.only in name and not alone(name)]
    print(json.dumps({"failed": failed}), flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
