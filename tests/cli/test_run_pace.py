"""What holdfast says about the pace of a job, beside what the ranks themselves have measured."""

from pathlib import Path

import pytest

from holdfast.core.record.release_pace import describe_paces
from holdfast.model.decider_events import WARM_STEPS
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_update_command import holdfast

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Trains 44 parameters, tells a thousand tokens a step, and notes when each step was done.
PACED = """
import os, sys, time
import torch
import holdfast
STEP_S = 0.1
folder, rank = sys.argv[1], os.environ["RANK"]
model = torch.nn.Linear(10, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
note, step = open(f"{folder}/step-{rank}-{os.environ['HOLDFAST_RELEASE']}", "a"), 0
while not os.path.exists(f"{folder}/finish"):
    time.sleep(0.5 if step < 3 else STEP_S)  # the first steps take longer, as they do
    model(torch.ones(10)).sum().backward()
    optimizer.step()
    step += 1
    holdfast.step(step, tokens=1000)
    print(time.monotonic(), file=note, flush=True)
os._exit(0)
"""
PEAK = 1e7  # FLOP/s of one rank
FLOPS = 6 * 44 * 1000  # of one step


def measured_s(folder: Path, release: int, steps: int) -> float:
    """How long these many steady steps took, by the ranks' own notes."""
    took = []
    for rank in (0, 1):
        times = [float(line) for line in (folder / f"step-{rank}-{release}").read_text().splitlines()]
        took.append(times[WARM_STEPS + steps] - times[WARM_STEPS])
    return max(took)


def steps_of(job: Job, release: int) -> int:
    said = next((line for line in job.status().get("pace", ()) if line.startswith(f"release {release} makes ")), "")
    return int(said.partition("measured over ")[2].split()[0]) if said else 0


def test_the_pace_of_two_releases(tmp_path: Path, start: Start) -> None:
    (tmp_path / "proj").mkdir()
    quick = ("--set", "pace.progress_s=0.5", "--set", "silence.beat_s=0.2", "--set", f"pace.peak_flops={PEAK}")
    job = start(*quick, "--nnodes=2", script=PACED, name="proj/train")
    job.trains()
    job.until(lambda: steps_of(job, 1) >= 30, "thirty steady steps")
    (tmp_path / "proj/train.py").write_text(PACED.replace("STEP_S = 0.1", "STEP_S = 0.04"))
    done = holdfast("update", "--run", "run", "--now", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    job.until(lambda: steps_of(job, 2) >= 60, "sixty steady steps")
    shown = job.status()
    job.finish()
    job.ends(0)
    job.check_replay()
    old, new = job.report().paces
    for pace in (old, new):
        assert pace.seconds == pytest.approx(measured_s(tmp_path, pace.release, pace.steps), abs=0.5)
        assert pace.tokens_s == pytest.approx(1000 * pace.steps_s)
        assert pace.mfu == pytest.approx(FLOPS * pace.steps_s / (2 * PEAK)) and pace.estimated
    assert new.steps_s > 1.3 * old.steps_s, "the slow first steps are not counted"
    *each, compared = shown["pace"]
    assert len(each) == 2 and compared.startswith("release 2 is ") and compared.endswith(" as release 1, by tokens/s")
    printed = " ".join(holdfast("report", "run", folder=tmp_path).stdout.split())
    assert all(pace in printed for pace in describe_paces((old, new)))
