"""From a killed rank until its survivors step, and until all four seats do; and what a step takes while all is well.

`make bench-elastic ARGS="holdfast torchft"` measures these ways alone.
"""

import os
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import msgspec
from rich.table import Table

from benchmarks._elastic_ways import OURS, PLAIN, RESTART, SEATS, SPARES, Way, list_ways
from benchmarks._harness import START_LIMIT_S, Event, Job
from benchmarks._report import FULL, Findings, brief, median, report

VICTIM = 2  # no job under in-process restart outlives rank 0, which has its store
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5" if FULL else "1"))
WARM_STEPS, WAIT_S = 100, 60.0  # steps before a fault: by then the zygotes know what the script imports
SETTLING_STEPS = 20  # of these: they are not typical
GOAL_S = 0.3


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a way. Seconds are None if it did not come to that in time."""

    survivors_s: float | None = None  # until each of the other three had made a step after the fault
    seats_s: float | None = None  # until four processes had made one together
    kept: int = 0  # of the other three, those that take part at the end
    step_s: float = 0.0  # the median, before the fault
    failed: str = ""  # why nothing was measured


# --- measuring ------------------------------------------------------------------------------------------------------


def try_way(way: Way) -> Trial:
    """Train, kill one rank, and wait until all step again who are expected to."""
    with Job(SEATS, way.script) as job:
        way.start(job)
        before = job.wait(lambda: find_seated(job.events(), 1, WARM_STEPS), START_LIMIT_S)
        if before is None:
            return tell_failure(job, way, f"it did not come to step {WARM_STEPS} within {START_LIMIT_S:g} s")
        if way.spares and not job.wait(lambda: count_spares(job.events()) >= way.spares or None, START_LIMIT_S):
            return tell_failure(job, way, f"its spares did not stand by within {START_LIMIT_S:g} s")
        step_s = median_step_s(job.events(), before[0].generation)
        return (
            msgspec.structs.replace(kill_one(job, way, before), step_s=step_s) if way.killed else Trial(step_s=step_s)
        )


def tell_failure(job: Job, way: Way, why: str) -> Trial:
    print(f"{way.name}: {why}; the last words:\n{job.last_words()}", flush=True)
    return Trial(failed=why)


def kill_one(job: Job, way: Way, before: Sequence[Event]) -> Trial:
    generation, victim = before[0].generation, next(event.pid for event in before if event.rank == VICTIM)
    others = {event.pid for event in before} - {victim}
    killed_at = job.fault().at
    job.kill(victim)

    def look() -> list[Event] | None:
        if way.refills:
            return find_seated(job.events(), generation + 1)
        return find_survivors(job.events(), generation + 1, others)

    if job.wait(look, WAIT_S) is None:
        print(f"{way.name}: not all were back after {WAIT_S:g} s; the last words:\n{job.last_words()}", flush=True)
    survivors = find_survivors(job.events(), generation + 1, others)
    if survivors is None:
        print(f"{way.name}: not all survivors went on; the last words:\n{job.last_words()}", flush=True)
    seated = find_seated(job.events(), generation + 1)
    return Trial(
        survivors_s=_last_s(survivors, killed_at),
        seats_s=_last_s(seated, killed_at),
        kept=kept_of(job.events(), others, generation),
    )


def find_seated(events: Sequence[Event], first: int, count: int = 1) -> list[Event] | None:
    """Return each seat's step of this number, in the first generation from `first` on in which all have made it."""
    made: dict[int, dict[int, list[Event]]] = {}
    for event in events:
        if event.generation >= first:
            made.setdefault(event.generation, {}).setdefault(event.pid, []).append(event)
    for generation in sorted(made):
        found = [steps[count - 1] for steps in made[generation].values() if len(steps) >= count]
        if len(found) == SEATS:
            return found
    return None


def find_survivors(events: Sequence[Event], first: int, pids: Collection[int]) -> list[Event] | None:
    """Return the first step of each of these processes from this generation on; None unless all have made one."""
    found: dict[int, Event] = {}
    for event in events:
        if event.generation >= first and event.pid in pids:
            found.setdefault(event.pid, event)
    return list(found.values()) if len(found) == len(pids) else None


def kept_of(events: Sequence[Event], pids: Collection[int], generation: int) -> int:
    """Return how many of these processes step in the newest generation, if that is newer than this one."""
    last = max(event.generation for event in events)
    return len({event.pid for event in events if event.generation == last and event.pid in pids}) * (last > generation)


def count_spares(events: Sequence[Event]) -> int:
    return len({event.pid for event in events if event.kind == "spare"})


def median_step_s(events: Sequence[Event], generation: int) -> float:
    """Return the median time from step to step of all processes in a generation, without its first steps."""
    made: dict[int, list[float]] = {}
    for event in events:
        if event.generation == generation:
            made.setdefault(event.pid, []).append(event.at)
    gaps = [b - a for at in made.values() for a, b in pairwise(at[SETTLING_STEPS:])]
    return statistics.median(gaps) if gaps else 0.0


def _last_s(events: Sequence[Event] | None, since: float) -> float | None:
    return max(event.at for event in events) - since if events else None


# --- telling --------------------------------------------------------------------------------------------------------


def judge(trials: Mapping[str, Sequence[Trial]], skipped: Mapping[str, str]) -> Findings:
    findings = Findings(skipped=dict(skipped))
    told = {name: [one for one in mine if not one.failed] for name, mine in trials.items()}
    for name, mine in trials.items():
        if failed := [one.failed for one in mine if one.failed]:
            findings.skipped[f"{name}, {len(failed)} of {len(mine)} jobs"] = failed[0]
    plain = middle_ms(told.get(PLAIN, ()))
    for name, mine in told.items():
        key = key_of(name)
        if step_ms := middle_ms(mine):
            findings.figures[f"{key}_step_ms"] = step_ms
            findings.figures |= {f"{key}_beside_plain": round(step_ms / plain, 3)} if plain else {}
        if name != PLAIN and mine:
            findings.figures[f"{key}_survivors_s"] = rounded(middle_survivors(mine))
            findings.figures[f"{key}_seats_s"] = rounded(middle_seats(mine))
            findings.figures[f"{key}_kept"] = sum(one.kept for one in mine) / len(mine)
    if told.get(OURS):
        findings.goals = judge_ours(told)
    return findings


def judge_ours(told: Mapping[str, Sequence[Trial]]) -> dict[str, bool]:
    """Ahead is whose median is sooner; who never comes to it is last. Spares are beside spares."""
    seated = middle_seats(told[OURS])
    goals = {
        f"under_{GOAL_S}_s": seated is not None and seated <= GOAL_S,
        "processes_go_on": all(one.kept == SEATS - 1 for one in told[OURS]),
    }
    if told.get(RESTART):
        goals["sooner_than_a_restart"] = sooner(seated, middle_seats(told[RESTART]))
        goals["a_restart_keeps_none"] = not any(one.kept for one in told[RESTART])
    for name in (name for name in told if name not in (OURS, SPARES, RESTART, PLAIN) and told[name]):
        beside = told[SPARES] if "spare" in name and told.get(SPARES) else told[OURS]
        goals[f"survivors_sooner_than_{key_of(name)}"] = sooner(middle_survivors(beside), middle_survivors(told[name]))
        goals[f"seats_sooner_than_{key_of(name)}"] = sooner(middle_seats(beside), middle_seats(told[name]))
    return goals


def key_of(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_").replace("-", "_")


def middle_survivors(trials: Sequence[Trial]) -> float | None:
    return median([one.survivors_s for one in trials])


def middle_seats(trials: Sequence[Trial]) -> float | None:
    return median([one.seats_s for one in trials])


def sooner(one: float | None, other: float | None) -> bool:
    return one is not None and (other is None or one < other)


def middle_ms(trials: Sequence[Trial]) -> float | None:
    middle = median([one.step_s for one in trials]) if trials else None
    return round(1000 * middle, 2) if middle else None


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def show(trials: Mapping[str, Sequence[Trial]]) -> Table:
    columns = ("way", "jobs", "survivors step, s", "four seats step, s", "kept, of 3", "a step, ms", "beside plain")
    table = Table(*columns, title=(__doc__ or "").partition("\n")[0])
    plain = middle_ms([one for one in trials.get(PLAIN, ()) if not one.failed])
    for name, mine in trials.items():
        told = [one for one in mine if not one.failed]
        step_ms = middle_ms(told)
        struck = told if name != PLAIN else []
        table.add_row(
            name,
            str(len(told)),
            brief(middle_survivors(struck)) if struck else "",
            brief(middle_seats(struck)) if struck else "",
            " ".join(str(one.kept) for one in struck),
            f"{step_ms:.2f}" if step_ms else "",
            f"{step_ms / plain:.3f}" if step_ms and plain else "",
        )
    return table


def main(asked: list[str]) -> int:
    ways, skipped = list_ways()
    if asked:
        skipped |= {way.name: "not asked for" for way in ways if way.name not in asked}
        ways = [way for way in ways if way.name in asked]
    if not ways:
        print(f"bench-elastic: there is no way {', '.join(asked)} here", file=sys.stderr)
        return 2
    trials: dict[str, list[Trial]] = {way.name: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            trials[way.name].append(try_way(way))
            print(f"  {way.name}: {trials[way.name][-1]}", flush=True)
    runs: dict[str, list[float | None]] = {}
    for name, mine in trials.items():
        told = [one for one in mine if not one.failed]
        runs[f"{name}, step"] = [one.step_s for one in told]
        if name != PLAIN:
            runs |= {f"{name}, survivors": [one.survivors_s for one in told]}
            runs |= {f"{name}, seats": [one.seats_s for one in told]}
    report("elastic", show(trials), judge(trials, skipped), runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
