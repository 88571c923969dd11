"""From a fault to all ranks stepping again, for each kind of fault, under holdfast and under launchers of others.

`make bench-recovery ARGS="holdfast torchrun"` runs these launchers alone.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import msgspec
from rich.table import Table

from benchmarks._harness import START_LIMIT_S, Fault, Job
from benchmarks._kept import Kept
from benchmarks._recover_launchers import Launcher, Running, launchers
from benchmarks._report import FULL, Findings, brief, median, report
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.incident_record import Record

RANKS, VICTIM, OTHER = 4, 2, 1  # where there are two nodes these two are on different ones
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5" if FULL else "1"))
WAIT_S = 120.0  # for recovery; after that it counts as none
# No two faults strike at the same count of steps after a launch: that is how a bug in the script looks, and the nodes
# would be probed for it.
WARM_STEPS, SETTLED_STEPS, MORE_STEPS = 10, 15, 5
OURS = "holdfast"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One fault; no seconds when the job did not come back in time."""

    case: str
    seconds: float | None
    phases: dict[str, float] = {}  # ours, by the journal
    load: float = 0.0


class Round(msgspec.Struct, frozen=True):
    """Every case once under one launcher."""

    trials: list[Trial] = []
    failed: str = ""  # why there are none


# --- the faults: each gives the instant of the (first) fault, and who was there before the last one ------------------


def kill(running: Running) -> Fault:
    fault = running.job.fault()
    running.job.kill(running.job.pid_of(VICTIM))
    return fault


def kill_two(running: Running) -> Fault:
    fault = running.job.fault()
    running.job.kill(running.job.pid_of(VICTIM), running.job.pid_of(OTHER))
    return fault


def raise_exception(running: Running) -> Fault:
    job, fault = running.job, running.job.fault()
    (job.folder / "events" / f"raise-{VICTIM}").touch()

    def raised() -> float | None:
        return next((e.at for e in job.events() if e.kind == "raised" and e.at > fault.at), None)

    at = job.wait(raised, START_LIMIT_S)
    if at is None:
        raise RuntimeError(f"rank {VICTIM} did not raise as it was told")
    return Fault(at=at, before=fault.before)


def kill_amid_recovery(running: Running) -> Fault:
    """The second rank is killed as soon as it is heard of: its process runs the script, and has no group yet."""
    job, first = running.job, kill(running)

    def fresh() -> int | None:
        return next((e.pid for e in job.events() if e.pid not in first.before and job.owns(e.pid)), None)

    victim = job.wait(fresh, WAIT_S)
    if victim is None:
        return first
    second = job.fault()
    job.kill(victim)
    return Fault(at=first.at, before=second.before)


def stop(running: Running) -> Fault:
    fault = running.job.fault()
    running.stop_rank(VICTIM)
    return fault


def lose_node(running: Running) -> Fault:
    fault = running.job.fault()
    running.lose_node(VICTIM)
    running.replace_node()
    return fault


CASES: dict[str, Callable[[Running], Fault]] = {
    "rank killed": kill,
    "exception": raise_exception,
    "two ranks at once": kill_two,
    "fault amid recovery": kill_amid_recovery,
    "rank stopped": stop,
    "node lost": lose_node,
}


# --- measuring ------------------------------------------------------------------------------------------------------


def play(launcher: Launcher) -> Round:
    """All cases one after the other in one job; where it does not come back, in another."""
    ahead = [case for case in CASES if case != "node lost" or launcher.nodes > 1]
    trials: list[Trial] = []
    while ahead:
        with Job(RANKS) as job:
            running = Running(job, launcher)
            running.start()
            if job.wait_steps(WARM_STEPS) is None:
                return Round(trials=trials, failed=f"it never came to step {WARM_STEPS}: {job.last_words(3)}")
            trials += until_lost(running, ahead)
        shutil.rmtree(launcher.leaves, ignore_errors=True)
    return Round(trials=trials)


def until_lost(running: Running, ahead: list[str]) -> Iterator[Trial]:
    """Take cases off the list as long as the job comes back."""
    begun = len(ahead)
    while ahead:
        trial = tried(running, ahead.pop(0), SETTLED_STEPS + MORE_STEPS * (begun - len(ahead)))
        yield trial
        if trial.seconds is None:
            words = running.job.last_words()
            print(f"no recovery, and none awaited after {WAIT_S:g} s; the last words:\n{words}", flush=True)
            return


def tried(running: Running, case: str, settled_steps: int) -> Trial:
    """Play one fault, and wait until the job has made so many steps after it."""
    job = running.job
    running.await_standby()
    load, fault = os.getloadavg()[0], CASES[case](running)
    stepping_at = job.wait_steps(1, fault, WAIT_S)
    if stepping_at is None or job.wait_steps(settled_steps, fault) is None:
        return Trial(case=case, seconds=None, load=load)
    record = closed(running, fault) if running.launcher.name == OURS else None
    seconds = round(stepping_at - fault.at, 3)
    print(f"  {running.launcher.name}, {case}: {seconds:.2f} s{f'; {record.cause}' if record else ''}", flush=True)
    return Trial(case=case, seconds=seconds, phases=phases(record, fault.at) if record else {}, load=load)


def closed(running: Running, fault: Fault) -> Record | None:
    """What the journal says of the newest incident since the fault."""

    def look() -> Record | None:
        with closing(SqliteJournal(running.run_dir / "journal.db", read_only=True)) as journal:
            records = [entry.decision.closed for entry in journal.read()]
        return next((one for one in reversed(records) if one and one.resumed_at > fault.at), None)

    return running.job.wait(look, START_LIMIT_S)


def phases(record: Record, fault_at: float) -> dict[str, float]:
    """Where the time went, in order; those that nobody told of are part of the next one."""
    marks = {
        "detect": record.alarm_at,
        "stop": record.stopped_at,
        "probe": record.stopped_at + record.probed_s if record.probed_s else 0.0,
        "launch": record.launched_at,
        "groups": record.grouped_at,
        "restore": record.restored_at,
        "first step": record.resumed_at,
    }
    found, since = {}, fault_at
    for name, at in marks.items():
        if at:
            found[name] = round(max(0.0, at - since), 3)
            since = max(since, at)
    return found


# --- telling --------------------------------------------------------------------------------------------------------


def judge(rounds: Mapping[str, Sequence[Round]], skipped: Mapping[str, str]) -> Findings:
    """Ahead is who comes back sooner, in the median; who never does comes last."""
    findings = Findings(skipped=dict(skipped))
    for name, played in rounds.items():
        if why := next((one.failed for one in played if one.failed), ""):
            findings.skipped[name] = why
    for case in CASES:
        found = {name: median(times) for name in rounds if (times := seconds(rounds[name], case))}
        key = case.replace(" ", "_")
        findings.figures |= {f"{key}_{name}_s": middle for name, middle in found.items()}
        for part, took in middle_phases(rounds.get(OURS, ()), case).items():
            findings.figures[f"{key}_phase_{part.replace(' ', '_')}_s"] = took
        ours = found.pop(OURS, None)
        if found:
            findings.goals[f"{key}_ahead"] = ours is not None and all(t is None or ours < t for t in found.values())
    return findings


def seconds(played: Sequence[Round], case: str) -> list[float | None]:
    return [trial.seconds for one in played for trial in one.trials if trial.case == case]


def middle_phases(played: Sequence[Round], case: str) -> dict[str, float]:
    found: dict[str, list[float | None]] = {}
    for trial in (trial for one in played for trial in one.trials if trial.case == case):
        for part, took in trial.phases.items():
            found.setdefault(part, []).append(took)
    return {part: median(times) or 0.0 for part, times in found.items()}


def shown(rounds: Mapping[str, Sequence[Round]]) -> Table:
    table = Table("fault", *rounds, "phases of holdfast, s", title=(__doc__ or "").partition("\n")[0])
    for case in CASES:
        cells = []
        for played in rounds.values():
            times = seconds(played, case)
            back = sum(time is not None for time in times)
            part = f" ({back} of {len(times)} back)" if back < len(times) else ""
            cells.append(f"{brief(median(times))}{part}" if times else "cannot")
        parts = middle_phases(rounds.get(OURS, ()), case)
        table.add_row(case, *cells, ", ".join(f"{part} {took:.2f}" for part, took in parts.items()))
    return table


def main(asked: list[str]) -> int:
    found, skipped = launchers()
    if strange := sorted({*asked} - {launcher.name for launcher in found}):
        here = ", ".join(launcher.name for launcher in found)
        print(f"bench-recovery: there is no launcher {', '.join(strange)} here; there are {here}", file=sys.stderr)
        return 2
    if asked:
        skipped |= {launcher.name: "not asked for" for launcher in found if launcher.name not in asked}
        found = sorted((one for one in found if one.name in asked), key=lambda one: asked.index(one.name))
    kept, rounds = Kept("recovery"), {launcher.name: list[Round]() for launcher in found}
    for turn in range(ROUNDS):
        for launcher in found:
            rounds[launcher.name].append(kept.part(f"{launcher.name}-{turn}", Round, partial(play, launcher)))
    if any(launcher.name == "dlrover-run" for launcher in found):
        skipped["dlrover-run, node lost"] = "it gets nodes from Kubernetes or Ray alone; without them it runs one"
    runs = {f"{name}, {case}": times for name in rounds for case in CASES if (times := seconds(rounds[name], case))}
    report("recovery", shown(rounds), judge(rounds, skipped), runs)
    kept.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
