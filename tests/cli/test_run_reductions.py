"""The recipe of the README with three ranks, whose sums depend on their order: equal bits after a fault and a stop."""

from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_run_state import said

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = """
import hashlib, os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import holdfast

folder = os.environ["HOLDFAST_PLACE"]
fails = os.path.join(folder, "fails")
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
    torch.nn.Linear(64, 16)), bucket_cap_mb=0.005)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ckpt = holdfast.Checkpointer(model=model, optimizer=optimizer, path=folder + "/ckpt", every=10)
restored = ckpt.restore()
print("restored", restored, flush=True)
for step in range(restored + 1, 121):
    if step == 40 and rank == 1 and os.path.exists(fails):
        os.remove(fails)
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    ckpt.save(step)
    holdfast.step(step, loss=loss)
    time.sleep(0.03)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
dist.destroy_process_group()
"""


def stop_after_40_steps(job: Job) -> None:
    job.until(lambda: job.trains()["step"] >= 40, "40 steps")
    job.interrupt()
    job.process.wait(120)


def test_the_recipe_gives_equal_bits_with_three_ranks(start: Start, tmp_path: Path) -> None:
    weights, restored = dict[str, list[list[str]]](), dict[str, int]()
    for name in ("calm", "killed", "stopped", "resumed"):
        place = tmp_path / name.replace("resumed", "stopped")
        place.mkdir(exist_ok=True)
        if name == "killed":
            (place / "fails").touch()
        run_dir = tmp_path / f"run-{name}"
        flags = ("--nnodes", "1", "--nproc-per-node", "3", "--run-dir", str(run_dir))
        job = start(*flags, script=RECIPE, name=name, HOLDFAST_PLACE=str(place))
        job.run_dir = run_dir
        if name == "stopped":
            stop_after_40_steps(job)
            continue
        job.ends(0)
        weights[name], restored[name] = said(job, "weights"), int(said(job, "restored")[0][0])
        assert len(job.report().incidents) == (name == "killed")
    assert restored["resumed"] >= 40 and restored["calm"] < 1
    assert len(weights["calm"]) == 3 and len({word for line in weights["calm"] for word in line}) == 1
    assert weights["killed"] == weights["calm"] == weights["resumed"]
