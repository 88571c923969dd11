"""A node of a Slurm cluster loses power: seconds until all ranks step again, and until no step is missing any more."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product

import msgspec
from rich.table import Table

from benchmarks._cluster_ways import NODES, WAYS, ClusterJob, Event, Way, run_job
from benchmarks._kept import Kept
from benchmarks._report import FULL, Findings, brief, median, report
from tests.slurm.lab import SlurmLab, lacking, run_lab

HOSTS = 6
TRIALS = int(os.environ.get("BENCH_ROUNDS", "5" if FULL else "2"))
WARM_STEPS = 325  # checkpoints and copies are there by then
SLURM = {"SlurmdTimeout": "30"}  # a tenth of the default; much less is taken for a failure when a host is only busy
OURS, WITHOUT, SPARE, REQUEUE = (way.name for way in WAYS)
GOAL = 10.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One loss of power; None: that did not happen in time."""

    stepping_s: float | None = None  # until every rank has made a step
    whole_s: float | None = None  # until every rank has made all steps again that were made before
    lost_steps: int | None = None
    load: float = 0.0
    failed: str = ""


def play(lab: SlurmLab, way: Way) -> Trial:
    with run_job(lab, way) as job:
        if job.wait(lambda: _is_warm(job) or None) is None:
            return Trial(failed=f"it did not come to step {WARM_STEPS}: {job.last_words()}")
        load, before = os.getloadavg()[0], max(events[-1].step for events in job.steps().values())
        at = lab.lose_power(job.victim())
        stepping_at = job.wait(lambda: _first_steps(job, at))
        if stepping_at is None:
            return Trial(load=load, failed=f"not all ranks stepped again: {job.last_words()}")
        loaded = [event.step for life in job.lives() if life.started_at > at for event in life.events[1:2]]
        whole_at = job.wait(lambda: _passed(job, at, before))
        made = Trial(
            stepping_s=round(stepping_at - at, 2),
            whole_s=round(whole_at - at, 2) if whole_at else None,
            lost_steps=max(0, before - min(loaded)),
            load=load,
        )
        told = f"{made.stepping_s} s, {made.lost_steps} steps lost, whole after {made.whole_s} s; load {load:.0f}"
        print(f"  {way.name}: {told}\n  {job.phases()}", flush=True)
        return made


def _is_warm(job: ClusterJob) -> bool:
    made = job.steps()
    return len(made) == NODES and min(len(events) for events in made.values()) >= WARM_STEPS and job.has_spare()


def _first_steps(job: ClusterJob, since: float) -> float | None:
    """When the last rank had made its first step."""
    made = _together(job, since)
    return max(events[0].at for events in made.values()) if made else None


def _passed(job: ClusterJob, since: float, step: int) -> float | None:
    made = _together(job, since)
    reached = [next((event.at for event in events if event.step >= step), None) for events in made.values()]
    times = [at for at in reached if at is not None]
    return max(times) if len(times) == NODES else None


def _together(job: ClusterJob, since: float) -> Mapping[int, list[Event]]:
    made = job.steps(since)
    return made if len(made) == NODES else {}


def judge(trials: Mapping[str, Sequence[Trial]], skipped: Mapping[str, str]) -> Findings:
    findings = Findings(skipped=dict(skipped))
    middle = {name: median([trial.stepping_s for trial in played]) for name, played in trials.items()}
    for name, played in trials.items():
        findings.figures[f"{name}_s"] = middle[name]
        findings.figures[f"{name}_whole_s"] = median([trial.whole_s for trial in played])
        findings.figures[f"{name}_lost_steps"] = median([trial.lost_steps for trial in played])
        if why := next((trial.failed for trial in played if trial.failed), ""):
            findings.skipped[name] = why
    ours = middle.get(OURS)
    for name in (WITHOUT, SPARE, REQUEUE):
        theirs = middle.get(name)
        findings.figures[f"{name}_ratio"] = round(theirs / ours, 1) if ours and theirs else None
    if trials:
        ratio = findings.figures[f"{REQUEUE}_ratio"]
        findings.goals["standby_10x_requeue"] = isinstance(ratio, float) and ratio >= GOAL
        findings.goals["standby_ahead_of_spare"] = ours is not None and ours < (middle[SPARE] or float("inf"))
    return findings


def shown(trials: Mapping[str, Sequence[Trial]]) -> Table:
    table = Table("way", "all ranks step again, s", "steps lost", "no step missing, s", title=(__doc__ or "").strip())
    for name, played in trials.items():
        lost = ", ".join(str(trial.lost_steps) for trial in played)
        back = ", ".join(brief(trial.stepping_s) for trial in played)
        table.add_row(name, back, lost, ", ".join(brief(trial.whole_s) for trial in played))
    return table


def play_all(kept: Kept) -> dict[str, list[Trial]]:
    """All ways in turns, so that what else the machine does strikes all of them."""
    trials: dict[str, list[Trial]] = {way.name: [] for way in WAYS}
    with run_lab(HOSTS, SLURM) as lab:
        for turn, way in product(range(TRIALS), WAYS):
            trials[way.name].append(kept.part(f"{way.name}-{turn}", Trial, partial(play, lab, way)))
    return trials


def main() -> None:
    kept = Kept("cluster")
    skipped = {"all": why} if (why := lacking()) else {}
    trials = {} if skipped else play_all(kept)
    runs = {name: [trial.stepping_s for trial in played] for name, played in trials.items()}
    report("cluster", shown(trials), judge(trials, skipped), runs)
    kept.forget()


if __name__ == "__main__":
    main()
