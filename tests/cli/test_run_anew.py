"""A script without a resume begins at step 0 after each restart; nobody may call that a restore."""

import pytest

from holdfast.core.incident.incident_text import ADVICE
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.test_run_state import said

pytestmark = pytest.mark.e2e

FORGETS = """
import os, sys, time, torch
folder, net = sys.argv[1], torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(net.parameters())
kept = f"{folder}/kept.pt"
# RESUME
while not os.path.exists(f"{folder}/finish"):
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save([net.state_dict(), optimizer.state_dict()], kept + ".new")
    os.replace(kept + ".new", kept)
    time.sleep(0.02)
os._exit(0)
"""
RESUMES = FORGETS.replace(
    "# RESUME",
    """if os.path.exists(kept):
    for one, state in zip((net, optimizer), torch.load(kept)):
        one.load_state_dict(state)""",
)


def steps_made(job: Job, generation: int) -> None:
    job.until(lambda: job.trains(generation=generation)["step"] >= 5, f"steps of generation {generation}")


def test_a_script_without_resume_starts_from_step_0_and_that_is_said(start: Start) -> None:
    job = start("--nnodes", "1", script=FORGETS, zygote=True)
    for generation in (1, 2):
        steps_made(job, generation)
        job.kill(job.rank(0, generation=generation))
    job.trains(generation=3)
    job.finish()
    job.ends(0)
    first, second = job.report().incidents
    for record in (first, second):
        assert record.resumed_from == 0 and record.good_step >= 5
        lost = f"restarted in place, but the script started from step 0: lost {record.good_step} steps and "
        assert lost in record.sentence and any(lost in line for line in job.sentences())
    assert [ADVICE in line for line in job.sentences()].count(True) == 1
    assert job.report().spent_s["redo"] > 0


@pytest.mark.slow  # the same job, but for what it says
def test_a_script_with_its_own_resume_is_seen_to_go_on(start: Start) -> None:
    job = start("--nnodes", "1", script=RESUMES, zygote=True)
    steps_made(job, 1)
    job.kill(job.rank(0))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    [record] = job.report().incidents
    assert record.resumed_from is not None and 0 <= record.good_step - record.resumed_from <= 1
    assert record.evicted == () and f" step {record.resumed_from}, " in record.sentence


ASKS = """
import os, sys, time, torch
from torch.distributed.checkpoint.state_dict import get_state_dict
folder, net, made = sys.argv[1], torch.nn.Linear(2, 2), 0
optimizer = torch.optim.AdamW(net.parameters())
get_state_dict(net, optimizer)  # torch makes a step, so that there is a state to fill
kept = f"{folder}/kept.pt"
if os.path.exists(kept):
    *states, made = torch.load(kept)
    for one, state in zip((net, optimizer), states):
        one.load_state_dict(state)
print("from", made, flush=True)
while not os.path.exists(f"{folder}/finish"):
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    made += 1
    torch.save([net.state_dict(), optimizer.state_dict(), made], kept + ".new")
    os.replace(kept + ".new", kept)
    time.sleep(0.02)
os._exit(0)
"""


@pytest.mark.slow
def test_a_step_that_torch_made_up_is_not_counted_in_later_generations(start: Start) -> None:
    job = start("--nnodes", "1", script=ASKS, zygote=True)
    for generation in (1, 2):
        steps_made(job, generation)
        job.kill(job.rank(0, generation=generation))
    steps_made(job, 3)
    job.finish()
    job.ends(0)
    assert [["0"], *([str(record.resumed_from)] for record in job.report().incidents)] == said(job, "from")
