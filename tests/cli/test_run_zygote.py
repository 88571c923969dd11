"""With everything real: ranks forked from a zygote, torch's own store, gloo and DistributedDataParallel."""

import os
from pathlib import Path

import pytest

from holdfast.agent.agent_shell import COLD_START
from holdfast.cli.run_dirs.remembered_imports import FOLDER
from tests.cli.conftest import Start
from tests.cli.driver import TRAIN, Job, gone

pytestmark = pytest.mark.e2e

# It imports nothing of ours: its steps are counted by the optimizer hook of the launcher.
DDP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 4), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = f"{folder}/weights.pt"
step = 0
if os.path.exists(kept):
    state = torch.load(kept, weights_only=True)
    step = state.pop("step")
    model.module.load_state_dict(state)
while step < 400:
    loss = model(torch.full((2, 4), float(step % 7 + rank))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if rank == 0:
        torch.save({"step": step, **model.module.state_dict()}, kept + ".new")
        os.replace(kept + ".new", kept)
    stop = torch.tensor(float(os.path.exists(f"{folder}/finish")))
    dist.all_reduce(stop)
    if stop:
        break
    time.sleep(0.01)
print("sum", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_a_real_job_are_forked_and_heal(start: Start) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2", script=DDP)
    job.trains()
    first = job.ranks(4)
    job.kill(first[3])
    job.trains(generation=2)
    assert gone(*first)
    for node in ("n0", "n1"):
        log = job.run_dir / "nodes" / node / "agent.log"
        assert COLD_START not in log.read_text(), "this was to be about forked ranks"
    stat = Path(f"/proc/{job.rank(0, generation=2)}/stat").read_text()
    assert int(stat.rpartition(")")[2].split()[1]) == job.holder("n0"), "the holder is the parent, it alone reaps"
    job.finish()
    job.ends(0)
    assert job.text().count(" sum 4\n") == 4
    [record] = job.report().incidents
    assert (record.ranks, record.verdict.remedy) == ((3,), "restart")
    assert record.resumed_from is None, "the script restores itself and did not say"
    assert "Traceback" not in "".join(job.sentences())
    assert os.path.exists(job.folder / "weights.pt")


TELLS = "import sys\nprint('ready', 'rich.table' in sys.modules, flush=True)\nimport rich.table\n" + TRAIN


def has_more_modules(job: Job) -> None:
    zygotes = job.run_dir / "nodes" / "n0" / "agent.log"
    job.until(lambda: "zygote: " in zygotes.read_text(), "a zygote with more modules")


def readiness(job: Job) -> list[str]:
    return [line.split()[-1] for line in job.text().splitlines() if "] ready " in line]


def test_what_the_script_imports_is_preloaded_for_the_next_generation(start: Start) -> None:
    job = start("--nproc-per-node", "1", "--max-restarts", "99", script=TELLS, zygote=True)
    job.trains()
    zygotes = job.run_dir / "nodes" / "n0" / "agent.log"
    job.until(lambda: "zygote: " in zygotes.read_text(), "a zygote with more modules")
    job.kill(job.rank(0))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    assert readiness(job) == ["False", "True"]


@pytest.mark.slow
def test_the_next_run_of_a_script_has_it_before_its_first_launch(start: Start) -> None:
    """Where ranks share processors, they are forked with it; where each has one, they do not wait for it."""
    many = len(os.sched_getaffinity(0)) + 1
    for number, known in ((1, ["False"] * many), (2, ["False"] * many + ["True"] * many)):
        job = start("--nproc-per-node", str(many), script=TELLS, zygote=True)
        job.trains()
        has_more_modules(job)
        job.until(lambda: any((Path(os.environ["HOLDFAST_HOME"]) / FOLDER).glob("*.json")), "a note for the next run")
        job.finish()
        job.ends(0)
        assert readiness(job) == known
        job.run_dir.rename(job.folder / f"run-{number}")
        (job.folder / "finish").unlink()


# It prints, as many scripts do, before it needs what takes longest to import.
# It goes on until it is told to finish, however long the zygote takes.
EARLY = DDP.replace("while step < 400:", "while True:")
EARLY = EARLY.replace("import torch\n", "import torch\nprint('ready', 'torch._dynamo' in sys.modules, flush=True)\n", 1)


@pytest.mark.slow
def test_the_first_line_waits_for_torch_alone_and_a_restart_for_nothing(start: Start) -> None:
    job = start("--nproc-per-node", "2", "--max-restarts", "99", script=EARLY, OWN_SERVER="1")
    job.trains()
    zygotes = job.run_dir / "nodes" / "n0" / "agent.log"
    job.until(lambda: "zygote: " in zygotes.read_text(), "a zygote with more modules")
    job.kill(job.rank(0))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    assert readiness(job) == ["False", "False", "True", "True"]
    assert COLD_START not in zygotes.read_text()


@pytest.mark.slow
def test_a_standby_has_it_ready_too(start: Start) -> None:
    job = start("--standbys", "1", script=TELLS, zygote=True)
    job.trains()
    seated = next(node["node"] for node in job.status()["nodes"] if node["ranks"] == "0")  # whoever was ready first
    zygotes = job.run_dir / "nodes" / ("n1" if seated == "n0" else "n0") / "agent.log"
    job.until(lambda: "zygote: " in zygotes.read_text(), "a zygote with more modules")
    job.kill(job.holder(seated))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    assert readiness(job) == ["False", "True"]
