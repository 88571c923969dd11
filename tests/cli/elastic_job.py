"""Scripts with an elastic pipeline that strikes itself, and what came of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.driver import Job
from tests.conftest import job_environment

STEPS = 8
STRUCK = 5  # the step in which a rank strikes itself
# Where: in a layer's forward or backward pass, or as a phase of the step begins.
POINTS = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "sums": "before the reduction",
    "vote": "after the vote-ready gradient",
    "apply": "after the vote",
    "keep": "after the optimizer's step",
}

TRAIN = f"""
import functools, json, os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
import holdfast
from holdfast.client.elastic.routed_passes import RoutedPasses
from holdfast.client.elastic.step_phase_times import StepPhases
folder = sys.argv[1]
asked = json.loads(os.environ.get("HOLDFAST_JOB", "{{}}"))
if "store_every" in asked:
    asked["path"] = f"{{folder}}/layers"
strikes = json.loads(os.environ.get("HOLDFAST_STRIKES", "[]"))  # rank, generation, step, point, signal
gates = json.loads(os.environ.get("HOLDFAST_GATES", "[]"))
torch.set_num_threads(1)
dist.init_process_group("gloo")
now = dict(rank=int(os.environ["RANK"]), generation=1 + ("HOLDFAST_REHEARSAL" in os.environ), step=0)

def strike(point):
    for rank, generation, step, where, number in strikes:
        if (rank, generation, step, where) == (now["rank"], now["generation"], now["step"], point):
            note = f"{{folder}}/struck-{{rank}}-{{generation}}"
            if os.path.exists(note):
                continue
            with open(note, "x") as file:
                file.write(point)
                file.flush()
                os.fsync(file.fileno())
            os.kill(os.getpid(), number)

strike("start")

class Struck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        strike("backward")
        return gradient

class Residual(nn.Module):
    def __init__(self, width, seen=0):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
    def forward(self, x):
        strike("forward")
        return Struck.apply(x + self.dropout(nn.functional.gelu(self.linear(x))))

plain = StepPhases.enter
def enter(self, name):
    plain(self, name)
    strike(name)
StepPhases.enter = enter
late = RoutedPasses._make_weights_halves
def make_late(self, m, depth):
    strike("weights")
    late(self, m, depth)
RoutedPasses._make_weights_halves = make_late

def batch(step, microbatch):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + microbatch))
    return x, x.flip(1)

pipeline = holdfast.ElasticPipeline(
    [functools.partial(Residual, 16)] * 6,
    functools.partial(torch.optim.AdamW, lr=1e-2),
    nn.functional.mse_loss,
    microbatches=6,
    **dict(dict(stages=2, clip_norm=1.0, snapshot_every=3), **asked),
)

@holdfast.survive(pipeline=pipeline)
def train(here):
    now.update(rank=here.rank, generation=here.generation, step=0)
    for step in pipeline.steps(int(os.environ.get("HOLDFAST_STEPS", "{STEPS}"))):
        while step in gates and not os.path.exists(f"{{folder}}/go-{{step}}"):
            time.sleep(0.02)
        now["step"] = step
        loss = pipeline.step(batch)
        now["step"] = 0
        if here.rank == 0:
            with open(f"{{folder}}/losses", "a") as file:
                file.write(json.dumps([step, loss, here.generation]) + "\\n")
        holdfast.step(step, loss=loss)

train()
print("holds", *pipeline.layers, flush=True)
told = [dict(policy=r.policy, step=r.step, again=r.again, workers=r.workers) for r in pipeline.recoveries]
with open(f"{{folder}}/recoveries-{{dist.get_rank()}}", "w") as file:
    json.dump(told, file)
print("digest", pipeline.digest(), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


def train_alone(folder: Path, **env: str) -> str:
    """The digest of a run of one process, without holdfast run and without failures."""
    script = folder / "alone.py"
    script.write_text(TRAIN)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "HOLDFAST_GENERATION": "1"}
    environment = make_rank_environment(job_environment()) | place | env
    said_alone = subprocess.check_output([sys.executable, str(script), str(folder)], env=environment, text=True)
    [digest] = [line.split()[1] for line in said_alone.splitlines() if line.startswith("digest")]
    return digest


def made_steps(folder: Path) -> list[tuple[int, float, int]]:
    """What the first rank made: step, loss and generation, in order."""
    return [tuple(json.loads(line)) for line in (folder / "losses").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step, as it counts: as it was last made."""
    return {step: loss for step, loss, _ in made_steps(folder)}


def recoveries(job: Job) -> list[dict[str, Any]]:
    """All that were seen by the rank that has seen most."""
    found: list[list[dict[str, Any]]] = [json.loads(path.read_text()) for path in job.folder.glob("recoveries-*")]
    return max(found, key=len)


def strike_at(*strikes: tuple[int, int, int, str, int]) -> str:
    return json.dumps(strikes)


def struck(job: Job) -> dict[str, str]:
    """Which rank struck itself in which generation, and where."""
    found = list(job.folder.glob("struck-*"))
    return {path.name.removeprefix("struck-"): path.read_text() for path in found}
