"""On a real Slurm: time limits, allocations that are there already, and hosts that nobody hears of any more."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from holdfast.checkpoint import stored_checkpoints
from holdfast.cli.commands.report_command import load_report
from holdfast.cli.run_dirs import batch_job_note
from holdfast.fleet import slurm_fleet, slurm_replies
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetReport
from tests.cli.driver import TRAIN, until
from tests.cli.test_run_parting import MADE
from tests.cli.test_run_state import TRAIN as MODEL
from tests.slurm.lab import LOGIN
from tests.slurm.slurm_job import HOLDFAST, SlurmJob, StartSlurm, start_slurm
from tests.slurm.test_slurm_faults import STEPS, calm_weights, limit_min, weights

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
__all__ = ["calm_weights", "start_slurm"]

# It says when it makes steps, and in which generation.
DATED = TRAIN.replace(
    "    holdfast.step(step",
    """    with open(f"{folder}/steps", "a") as file:
        print(os.environ["TORCHELASTIC_RESTART_COUNT"], time.time(), file=file)
    holdfast.step(step""",
)


def test_a_time_limit_is_seen_ahead_and_the_seats_move(
    start_slurm: StartSlurm, tmp_path: Path, calm_weights: str
) -> None:
    job = start_slurm(
        "--nnodes",
        "2",
        "--slurm",
        f"time={limit_min(4)} exclusive",
        "--set",
        "recovery.leave_s=30",
        script=slowed(MODEL),
        HOLDFAST_STEPS=STEPS,
    )
    [first] = job.until(job.queue, "the job of the start")
    job.trains()
    job.says("takes n0, n1 away", patience_s=60 * limit_min(4))
    before_the_end = lambda: first in (found := job.queue()) and len(found) > 1  # noqa: E731
    job.until(before_the_end, "successors in the queue before the end", patience_s=60)
    job.trains(generation=2)
    job.ends(0, patience_s=300)
    assert weights(job) == calm_weights
    assert not job.report().incidents and job.report().changes
    job.check_replay()


def check_storage(text: str, store: Path) -> None:
    """Each launch begins with the newest step that all ranks had made before, as storage has it; no other is due."""
    begun = re.findall(r"\] from (\d+) storage", text)
    assert len(begun) > 1 and all(begun.count(step) == 2 for step in begun), "two ranks, at each launch but the first"
    for step in set(begun):
        before = text[: text.index(f"] from {step} storage")]
        made = {rank: int(made) for rank, made in re.findall(r"\[rank (\d+)\] made (\d+)", before)}
        assert len(made) == 2 and 0 <= int(step) - min(made.values()) <= 1, "what is printed comes a moment later"
    assert next(found.step for found in stored_checkpoints.find_checkpoints(str(store))) == int(STEPS)


def slowed(script: str) -> str:
    """The same training, which takes as long as it takes a time limit to come."""
    return script.replace("0.05)", f"{60 * limit_min(4) / int(STEPS):g})")


def test_a_batch_job_goes_on_in_its_successor_after_the_time_limit(
    start_slurm: StartSlurm, tmp_path: Path, calm_weights: str
) -> None:
    lab = start_slurm.lab
    (tmp_path / "job.py").write_text(slowed(MADE))
    words = ["sbatch", "--run-dir", str(tmp_path / "run"), "--nnodes", "2", "--slurm", f"time={limit_min(4)}"]
    words += ["--set", "recovery.leave_s=40", "--set", "probe.allow=false", "job.py", str(tmp_path)]
    store = tmp_path / "store"
    told = start_slurm.call_holdfast(*words, HOLDFAST_STEPS=STEPS, HOLDFAST_STORE=str(store))
    assert "Submitted batch job" in told
    output = tmp_path / "run.out"

    def text() -> str:
        return output.read_text(errors="replace") if output.exists() else ""

    def grows() -> object:
        return len(text()), lab.call("squeue", "-h", "-o", "%i %T")

    until((tmp_path / "run" / "controller.json").exists, "its controller", 100, grows)
    follower = follow(start_slurm, tmp_path)
    until(lambda: "time limit" in text(), "the end of its time", 30 * limit_min(4), grows)
    until(lambda: "goes on with other nodes" in text() or "resuming" in text(), "its successor", 100, grows)
    until(lambda: text().count("] weights ") == 2 and "done: " in text(), "its end", 150, grows)
    assert text().count(f"] weights {calm_weights}") == 2, text()
    until(lambda: not lab.call("squeue", "-h").strip(), "an empty queue")
    report = load_report(tmp_path / "run")
    assert report.code == 0 and report.generation >= 2, "one journal"
    check_storage(text(), store)
    assert follower.wait(60) == 0, "who followed it from the login host saw it end well, and once"
    seen = (tmp_path / "followed").read_text()
    assert seen.count(f"] weights {calm_weights}") == 2, seen
    assert seen.splitlines().count("holdfast attach: the run goes on") == 1, seen
    assert not batch_job_note.note_path(tmp_path / "run").exists()


def follow(start_slurm: StartSlurm, folder: Path) -> "subprocess.Popen[bytes]":
    """`holdfast attach` at the login host, while the controller is on another one."""
    words = start_slurm.lab.words(*HOLDFAST, "attach", "--run", str(folder / "run"), on=LOGIN)
    with (folder / "followed").open("wb") as output:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=start_slurm.env
        )


def test_a_batch_job_ends_ahead_of_its_reservation_and_has_a_successor_by_then(
    start_slurm: StartSlurm, tmp_path: Path, calm_weights: str
) -> None:
    lab, store = start_slurm.lab, tmp_path / "store"
    lab.reserve("short", limit_min(3), *lab.nodes[:2])
    shown = lab.call("scontrol", "--oneliner", "show", "reservation", "short", SLURM_TIME_FORMAT="%s")
    ends_at = slurm_replies.parse_reservations(shown)["short"].ends_at
    (tmp_path / "job.py").write_text(slowed(MADE))
    words = ["sbatch", "--run-dir", str(tmp_path / "run"), "--nnodes", "2", "--slurm", "time=60 reservation=short"]
    words += ["--set", "recovery.leave_s=40", "--set", "probe.allow=false", "job.py", str(tmp_path)]
    start_slurm.call_holdfast(*words, HOLDFAST_STEPS=STEPS, HOLDFAST_STORE=str(store))
    output = tmp_path / "run.out"

    def text() -> str:
        return output.read_text(errors="replace") if output.exists() else ""

    def grows() -> object:
        return len(text()), lab.call("squeue", "-h", "-o", "%i %T")

    told = "reservation short ends: the fleet takes all"
    until(lambda: told in text(), "the end of its time", 60 * limit_min(3) + 20, grows)
    until(lambda: "ended with code 95" in text(), "its state on storage", 60, grows)
    queued = until(lambda: lab.call("squeue", "-h", "-t", "PD", "-o", "%A %j").split(), "a successor")
    assert time.time() < ends_at, "all of it before Slurm would have ended it"
    [successor, name] = queued
    assert name.startswith("holdfast-") and batch_job_note.read_job(tmp_path / "run") == int(successor)
    until(lambda: lab.call("squeue", "-h", "-t", "R", "-o", "%i").split() == [], "the end of the first", 60, grows)
    lab.call("scontrol", "update", f"JobId={successor}", "ReservationName=", "TimeLimit=30", "StartTime=now")
    lab.call("scontrol", "release", successor, check=False)
    until(lambda: text().count("] weights ") == 2 and "done: " in text(), "its end", 250, grows)
    assert text().count(f"] weights {calm_weights}") == 2, text()
    until(lambda: not lab.call("squeue", "-h").strip(), "an empty queue")
    check_storage(text(), store)


def test_a_batch_job_that_is_cancelled_says_so_and_has_no_successor(start_slurm: StartSlurm, tmp_path: Path) -> None:
    lab = start_slurm.lab
    (tmp_path / "job.py").write_text(TRAIN)
    words = ["sbatch", "--run-dir", str(tmp_path / "run"), "--nnodes", "2", "--slurm", "time=30", "--no-zygote"]
    start_slurm.call_holdfast(*words, "--set", "probe.allow=false", "job.py", str(tmp_path))
    output = tmp_path / "run.out"
    until(lambda: output.exists() and "first step after" in output.read_text(), "the first step", 100)
    [job] = lab.call("squeue", "-h", "-o", "%i").split()
    lab.call("scancel", job)
    until(lambda: not lab.call("squeue", "-h").strip(), "an empty queue", 100)
    text = output.read_text()
    assert "time limit" not in text and ("stopped by SIGTERM" in text or f"job {job} was cancelled" in text), text


def test_batch_jobs_that_come_to_no_step_have_few_successors(start_slurm: StartSlurm, tmp_path: Path) -> None:
    """The script was printed, and submitted by hand under a name of the person's own."""
    lab = start_slurm.lab
    (tmp_path / "job.py").write_text("import time\ntime.sleep(3600)\n")
    words = ["sbatch", "--dry-run", "--run-dir", str(tmp_path / "run"), "--nnodes", "1", "--slurm", "time=2"]
    words += ["--no-zygote", "--set", "recovery.leave_s=90", "--set", "recovery.attempts=2"]
    (tmp_path / "mine.sh").write_text(start_slurm.call_holdfast(*words, "--set", "probe.allow=false", "job.py"))
    lab.call(
        "env", *(f"{name}={value}" for name, value in start_slurm.env.items()), "sbatch", str(tmp_path / "mine.sh")
    )
    output = tmp_path / "run.out"

    def text() -> str:
        return output.read_text(errors="replace") if output.exists() else ""

    def grows() -> object:
        return len(text()), lab.call("squeue", "-h", "-o", "%i %T")

    until(lambda: "ended with code 95" in text(), "the end of the first", 150, grows)
    until(lambda: "ended with code 93" in text(), "the end of the second", 150, grows)
    until(lambda: not lab.call("squeue", "-h").strip(), "an empty queue")
    told = "the job has lost all nodes or was ended 2 times in a row without a new step, so no others are asked for"
    report = load_report(tmp_path / "run")
    assert told in text() and report.code == 93 and told in report.ending


def test_a_standby_whose_job_is_cancelled_is_told_and_replaced(start_slurm: StartSlurm, tmp_path: Path) -> None:
    lab = start_slurm.lab
    held = lab.call("sbatch", "--parsable", "-N1", "--no-kill", "-o", "/dev/null", "--wrap", "sleep 900").strip()
    until(lambda: lab.call("squeue", "-h", "-j", held, "-o", "%T").strip() == "RUNNING", "an allocation")
    job = start_slurm("--nnodes", "1", "--standbys", "1", SLURM_JOB_ID=held)
    job.trains()
    job.standby_waits()
    [(spare, record)] = [(name, record) for name, record in job.records().items() if not record.lent]
    assert job.node_of_rank(0) != spare
    lab.call("scancel", str(record.job))
    job.until(lambda: f"standby {spare} " in job.text(), "a word about it", patience_s=60)
    [line] = [line for line in job.text().splitlines() if f"standby {spare} " in line]
    assert f"job {record.job} " in line and "cancelled" in line, "in Slurm's words, not by its silence"
    job.until(lambda: [name for name in job.records() if name > spare], "another", patience_s=60)
    job.standby_waits()
    assert job.records()[spare].cause is not Dismissal.EVICTED, "its host may be used again"
    job.finish()
    job.ends(0)
    assert not job.report().incidents


def test_a_job_all_of_whose_nodes_are_preempted_waits_for_others(
    start_slurm: StartSlurm, tmp_path: Path, calm_weights: str
) -> None:
    lab = start_slurm.lab
    lab.call("scontrol", "update", "PartitionName=main", "GraceTime=40")
    try:
        store = {"HOLDFAST_STORE": str(tmp_path / "store")}
        job = start_slurm("--nnodes", "2", script=slowed(MADE), inside=(), HOLDFAST_STEPS=STEPS, **store)
        job.trains()
        words = ("--parsable", "-p", "urgent", "-N6", "--exclusive", "--time=9", "-o", "/dev/null")
        urgent = lab.call("sbatch", *words, "--wrap", "sleep 500").strip()
        job.says("preempted: the fleet takes all nodes away", patience_s=120)
        job.says("it goes on when Slurm has other nodes for it", patience_s=120)
        job.says("waiting for 2 nodes: queued", patience_s=120)
        assert job.process.poll() is None and not (job.run_dir / "exit.json").exists()
        lab.call("scancel", urgent)
        job.trains(generation=2)
        job.ends(0, patience_s=300)
        assert weights(job) == calm_weights
        check_storage(job.text(), tmp_path / "store")
        job.check_replay()
    finally:
        lab.call("scontrol", "update", "PartitionName=main", "GraceTime=180")


def test_a_signal_of_slurm_at_a_node_is_looked_into_before_the_next_survey_is_due(start_slurm: StartSlurm) -> None:
    lab = start_slurm.lab
    job = start_slurm("--nnodes", "1", "--slurm", "time=30")
    job.trains()
    [gang] = job.queue()

    def wait_for_news(limit: str, *signal: str) -> float:
        """Change the time limit, and send a signal; return how long it takes until the journal has the new end."""
        known = len(job.events(FleetReport))
        lab.call("scontrol", "update", f"JobId={gang}", f"TimeLimit={limit}")
        if signal:
            lab.call("scancel", *signal, f"{gang}.0")
        began_at = time.monotonic()
        job.until(lambda: len(job.events(FleetReport)) > known, "the new end")
        return time.monotonic() - began_at

    wait_for_news("60")  # the next survey is as far away as can be
    assert wait_for_news("90", "--signal=USR1") < 0.6 * slurm_fleet._STEADY_S
    job.finish()
    job.ends(0)


def test_an_allocation_that_is_there_is_used_first(start_slurm: StartSlurm, tmp_path: Path) -> None:
    lab = start_slurm.lab
    held = lab.call("sbatch", "--parsable", "-N2", "--no-kill", "-o", "/dev/null", "--wrap", "sleep 900").strip()
    until(lambda: lab.call("squeue", "-h", "-j", held, "-o", "%T").strip() == "RUNNING", "an allocation")
    job = start_slurm("--nnodes", "2", "--standbys", "1", SLURM_JOB_ID=held)
    job.trains()
    jobs = {name: record.job for name, record in job.records().items()}
    assert sorted(jobs.values())[:2] == [int(held)] * 2 and len(set(jobs.values())) == 2, "one more is asked for"
    lent = next(node for node in map(job.node_of_rank, (0, 1)) if job.records()[node].lent)
    job.standby_waits()
    job.lab.power_off(job.host_of(lent))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    assert job.queue() == [held], "it is the user's"


def test_in_an_allocation_of_salloc_an_evicted_host_is_drained_and_what_was_asked_for_is_given_back(
    start_slurm: StartSlurm,
) -> None:
    lab = start_slurm.lab
    inside = ("salloc", "-N2", "--exclusive", "--no-kill", "--time=30")
    job = start_slurm("--nnodes", "2", "--standbys", "1", "--set", "slurm.drain=true", inside=inside)
    job.trains()
    job.standby_waits()
    records = job.records()
    lent = [record.job for record in records.values() if record.lent]
    assert len(lent) == 2 and len({*lent}) == 1 and len({record.job for record in records.values()}) == 2
    bad = job.node_of_rank(1)
    start_slurm.call_holdfast("evict", bad, str(job.run_dir))
    job.trains(generation=2)

    def shown() -> str:
        return lab.call("sinfo", "-h", "-p", "main", "-n", records[bad].host, "-o", "%T|%E").strip()

    job.until(lambda: shown().startswith("drain"), "its drain")
    assert job.run_dir.name in shown() or bad in shown() or "holdfast" in shown()
    job.finish()
    job.ends(0)
    job.until(lambda: not job.queue(), "an empty queue: salloc gives up what it had")


def test_the_fence_holds_while_a_rank_may_run_behind_a_cut_cable(start_slurm: StartSlurm, tmp_path: Path) -> None:
    job = start_slurm("--nnodes", "1", "--standbys", "1", "--set", "node.lost_s=20", script=DATED)
    job.trains()
    job.standby_waits()
    lost = job.host_of_rank(0)
    job.lab.cut(lost)
    job.says("could not be ended", patience_s=150)
    assert job.status()["generation"] == 1
    job.trains(generation=2)
    job.finish()
    job.ends(0)
    steps = [line.split() for line in (tmp_path / "steps").read_text().splitlines() if len(line.split()) == 2]
    old = [float(at) for generation, at in steps if generation == "0"]
    new = [float(at) for generation, at in steps if generation == "1"]
    assert max(old) < min(new), "no step of both generations at once"
    assert max(old) > old[0] + 20, "the old rank trained on for a while, as nobody could stop it"


def test_what_slurm_refuses_is_its_own_sentence(start_slurm: StartSlurm) -> None:
    job: SlurmJob = start_slurm("--nnodes", "2", "--slurm", "partition=nowhere")
    job.ends(2)
    assert "nvalid partition" in job.text() and "Traceback" not in job.text()
    assert not job.queue()
