"""A rank of an elastic pipeline over NCCL (gloo without a GPU) that strikes itself at one point of a step, once.

Ranks may share a GPU, as in _nccl_rank.py.
"""

import argparse
import functools
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_IB_DISABLE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.client.elastic import pipeline as elastic_pipeline
from holdfast.client.elastic.step_phase_times import StepPhases

ON_GPU = torch.cuda.is_available()
WIDTH, LAYERS, ROWS, MICROBATCHES = 512, 8, 16, 8
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Strike:
    """What befalls one rank: it is hit at a point of a step, unless that has happened already."""

    def __init__(self, folder: Path, named: str) -> None:
        self._note = folder / "struck"
        rank, step, self._point, self._how = named.split(":") if named else ("-1", "-1", "", "")
        self._rank, self._step = int(rank), int(step)
        self.now = (0, 0)  # rank and step

    def at(self, point: str) -> None:
        if self.now != (self._rank, self._step) or point != self._point or self._note.exists():
            return
        with self._note.with_suffix(".part").open("w") as file:
            file.write(str(time.time()))
            file.flush()
            os.fsync(file.fileno())
        self._note.with_suffix(".part").rename(self._note)
        os.kill(os.getpid(), SIGNALS[self._how])


class Hit(torch.autograd.Function):
    """Does nothing, but strikes in the backward pass."""

    @staticmethod
    def forward(ctx, x, strike):  # type: ignore[no-untyped-def]
        ctx.strike = strike
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.strike.at("backward")
        return gradient, None


class Residual(nn.Module):
    def __init__(self, strike: Strike) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self._strike = strike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._strike.at("forward")
        found: torch.Tensor = Hit.apply(x + self.dropout(nn.functional.gelu(self.linear(x))), self._strike)  # type: ignore[no-untyped-call]
        return found


def strike_phases(strike: Strike) -> None:
    """Strike also as phases of a step begin."""
    plain = StepPhases.enter

    def enter(self: StepPhases, name: str) -> None:
        plain(self, name)
        strike.at(name)

    StepPhases.enter = enter  # type: ignore[method-assign]


def trust_totals(
    mine: Sequence[torch.Tensor | float], device: torch.device, seal: object, *, asked: bool = False
) -> tuple[tuple[float, ...], bool]:
    """The last exchange of a step as it was before anybody looked whether it was aborted."""
    told = torch.stack([torch.as_tensor(one, dtype=torch.float64, device=device) for one in mine])
    dist.all_reduce(told)
    return tuple(told.tolist()), asked


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(step * MICROBATCHES + microbatch)
    x = torch.randn(ROWS, WIDTH, generator=chance)
    return x, x.flip(1)


def rehearse(pipeline: holdfast.ElasticPipeline, folder: Path) -> None:
    pipeline.rehearse(batch)
    if ON_GPU:
        torch.cuda.synchronize()
    (folder / f"rehearsed-{os.environ['RANK']}-{os.getpid()}").touch()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--ckpt", type=Path)  # states are in memory alone
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--strike", default="")  # rank:step:point:how
    parser.add_argument("--gate", type=int, default=0)  # before this step ranks wait for a file `go`
    parser.add_argument("--policy", default="")
    parser.add_argument("--unchecked", action="store_true")  # believe whatever an aborted exchange leaves behind
    return parser.parse_args()


def make_pipeline(strike: Strike, policy: str) -> holdfast.ElasticPipeline:
    return holdfast.ElasticPipeline(
        [functools.partial(Residual, strike)] * LAYERS,
        functools.partial(torch.optim.AdamW, lr=1e-3),
        nn.functional.mse_loss,
        microbatches=MICROBATCHES,
        stages=2,
        clip_norm=1.0,
        snapshot_every=5,
        policies=[policy or "replace"],
    )


def make_step(pipeline: holdfast.ElasticPipeline, here: holdfast.Here, folder: Path) -> float:
    """Make the next step, or note by what it broke off."""
    try:
        return pipeline.step(batch)
    except BaseException as e:
        broke = folder / f"broke-{here.rank}-{here.generation}"
        broke.write_text(f"{type(e).__name__}: {str(e).partition(chr(10))[0][:150]}")
        raise


def main() -> None:
    args = read_arguments()
    args.events.mkdir(exist_ok=True)
    strike = Strike(args.events, args.strike)
    strike_phases(strike)
    if args.unchecked:
        elastic_pipeline.exchange_totals = trust_totals  # type: ignore[attr-defined]
    if ON_GPU:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    pipeline = make_pipeline(strike, args.policy)
    phases: dict[int, dict[str, float]] = {}  # of the meeting at the begin of each generation

    @holdfast.survive(pipeline=pipeline, rehearsal=functools.partial(rehearse, pipeline, args.events))
    def train(here: holdfast.Here) -> None:
        with (args.events / f"{os.getpid()}.jsonl").open("a", buffering=1) as events:
            for step in pipeline.steps(args.steps):
                phases.setdefault(here.generation, pipeline._phases.took_s)
                while step == args.gate and not (args.events / "go").exists():
                    time.sleep(0.01)
                strike.now = here.rank, step
                loss = make_step(pipeline, here, args.events)
                strike.now = here.rank, 0
                holdfast.step(step, loss=loss)
                told = {"at": time.time(), "kind": f"step in {here.generation}", "pid": os.getpid(), "rank": here.rank}
                events.write(json.dumps({**told, "step": step}) + "\n")
                time.sleep(0.005)

    train()
    recoveries: list[dict[str, object]] = [
        one._asdict() | {"semantics": one.semantics.name, "phases_s": phases.get(generation)}
        for generation, one in enumerate(pipeline.recoveries, 2)
    ]
    (args.events / f"recoveries-{dist.get_rank()}").write_text(json.dumps(recoveries))
    (args.events / f"weights-{dist.get_rank()}").write_text(pipeline.digest())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
