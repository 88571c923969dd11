"""At the end of a run, metrics, status, report and console all tell what the test knows to be so."""

import json
import signal
import time

import pytest

from holdfast.wire.controller_request import ControllerNotRunning
from tests.cli.conftest import Start
from tests.cli.driver import Job, gone, run_command
from tests.prometheus.record_run import scrape

pytestmark = pytest.mark.e2e

STEPS = 60
# Makes its steps and ends; the last two waits are the test's. Its own file of each step is what the test knows.
SCRIPT = f"""
import atexit, os, sys, time
import holdfast
folder, rank = sys.argv[1], os.environ["RANK"]
def wait(name):
    while not os.path.exists(f"{{folder}}/{{name}}"):
        time.sleep(0.05)
mine = f"{{folder}}/step-{{rank}}"
step = int(open(mine).read()) if os.path.exists(mine) else 0
while step < {STEPS}:
    time.sleep(0.05)
    step += 1
    holdfast.step(step, loss=1 / step)
    with open(mine + ".new", "w") as file:
        file.write(str(step))
    os.replace(mine + ".new", mine)
wait("made")
if rank == "1":
    atexit.register(wait, "leave")
"""
LOOKS = 12


def made(job: Job) -> list[int]:
    return [int((job.folder / f"step-{rank}").read_text()) for rank in range(2)]


def compare(job: Job, steps: int) -> dict[str, float]:
    """What a scrape and the status say now, once both have said it."""
    found, status = scrape(job.run_dir), job.status()
    assert found["holdfast_step{}"] == status["step"] == steps
    assert found["holdfast_generation{}"] == status["generation"] == 2
    assert found['holdfast_incidents_total{kind="crash"}'] == 1 and found["holdfast_incident_open{}"] == 0
    return found


@pytest.mark.slow
def test_all_that_tells_of_a_run_agrees_at_its_end(start: Start) -> None:
    job = start("--nproc-per-node", "2", script=SCRIPT)
    job.trains()
    job.kill(job.rank(1), signal.SIGKILL)
    job.trains(generation=2)
    job.until(lambda: made(job) == [STEPS, STEPS], "all steps")
    job.until(lambda: scrape(job.run_dir).get("holdfast_step{}") == job.status().get("step") == STEPS, "the last step")
    compare(job, STEPS)

    (job.folder / "made").touch()  # rank 0 has ended, and rank 1 is about to
    zero = job.rank(0, generation=2)
    job.until(lambda: gone(zero), "the end of rank 0")
    last: dict[str, float] = {}
    for _ in range(LOOKS):
        last = compare(job, STEPS)
        time.sleep(0.1)
    (job.folder / "leave").touch()
    seen: list[float] = []
    while job.process.poll() is None:  # whatever is said until nobody answers any more
        try:
            seen += [value for name, value in scrape(job.run_dir).items() if name == "holdfast_step{}"]
            seen += [job.status().get("step", STEPS)]
        except (ControllerNotRunning, OSError):
            continue
    job.ends(0)
    assert set(seen) <= {float(STEPS)}, "it neither lags nor falls"

    report = job.report()
    [record] = report.incidents
    assert (report.step, report.generation, report.code) == (STEPS, 2, 0)
    assert any(record.sentence in line for line in job.sentences()), "the console's sentence is the report's"
    console = next(line for line in job.sentences() if line.startswith("holdfast: done: "))
    assert report.ettr is not None
    assert console.startswith(f"holdfast: done: 1 incident, ETTR {100 * report.ettr:.1f} %"), (console, report.ettr)
    assert last["holdfast_redone_steps_total{}"] == report.restarts[0].redone
    train_s = report.spent_s["train"]
    assert abs(last['holdfast_spent_seconds_total{use="train"}'] - train_s) < 5.0, "but for what came after"
    told = run_command("report", "--json", str(job.run_dir), folder=job.folder)
    shown = json.loads(told.stdout)
    assert (shown["step"], shown["generation"], len(shown["incidents"])) == (STEPS, 2, 1)
    assert run_command("status", str(job.run_dir), folder=job.folder).returncode == 1, "it has ended"
