"""Steps that are made again after a restart: another loss is noticed, and a third try shows which result was right."""

import pytest

from holdfast.model.detector_alarm import Kind
from tests.cli.conftest import Start

pytestmark = pytest.mark.e2e

# It keeps its state every ten steps, and waits at step 25. In the second generation something adds a little to its
# losses, as a machine that computes wrongly would; nothing else in it can tell.
TRAIN = """
import os, sys, time
import holdfast
folder, rank = sys.argv[1], os.environ["RANK"]
mine = f"{folder}/step-{rank}"
step = int(open(mine).read()) if os.path.exists(mine) else 0
wrong = 0.02 if os.environ["HOLDFAST_GENERATION"] == "2" and os.path.exists(f"{folder}/wrong") else 0.0
while not os.path.exists(f"{folder}/finish"):
    time.sleep(0.02)
    step += 1
    holdfast.step(step, loss=2 + 1 / step + wrong)
    if step % 10 == 0:
        with open(mine + ".new", "w") as file:
            file.write(str(step))
        os.replace(mine + ".new", mine)
    while (step == 25 and not os.path.exists(f"{folder}/on")) or (step == 24 and wrong):
        time.sleep(0.02)
"""


def test_a_redone_step_with_another_loss_is_made_a_third_time(start: Start) -> None:
    job = start("--nproc-per-node", "2", "--set", "loss.exact=true", script=TRAIN)
    job.until(lambda: job.status().get("step") == 25, "step 25")
    (job.folder / "wrong").touch()
    job.kill(job.rank(1))
    job.until(lambda: (job.rank_dir(1, generation=2) / "pid").exists(), "a second generation")
    (job.folder / "on").touch()
    job.says("step 21 was made again with loss 2.07, was 2.05: the restored state, the code or a machine differs")
    settled = job.says("has a loss of 2.04761905 again, as in generation 1; generation 2 had made it with 2.06761905")
    assert "step 21 " in settled
    job.trains(generation=3)
    job.finish()
    job.ends(0)
    crash, redone = job.report().incidents
    assert (crash.kind, redone.kind, redone.evicted, redone.resumed_from) == ("crash", "redone", (), 20)
    job.check_replay()


@pytest.mark.slow
def test_redone_steps_with_the_same_losses_are_no_news(start: Start) -> None:
    job = start("--nproc-per-node", "2", "--set", "loss.exact=true", script=TRAIN)
    job.until(lambda: job.status().get("step") == 25, "step 25")
    job.kill(job.rank(1))
    job.trains(generation=2)
    (job.folder / "on").touch()
    job.until(lambda: job.status().get("step", 0) > 40, "steps beyond the redone ones")
    job.finish()
    job.ends(0)
    [crash] = job.report().incidents
    assert crash.kind == "crash" and not job.alarms(Kind.REDONE)
