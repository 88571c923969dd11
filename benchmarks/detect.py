"""Hangs and slow ranks in real jobs: four gloo ranks on two nodes, steps of 0.2 s, default settings. Who is named?

BENCH_FULL=1 does the whole study in parts, each kept in benchmarks/out/ when it is done: what was cut short goes on
from there. With it ARGS="--part NAME" makes one of them alone, as several may be made at once where there are cores for
them: hangs-0 to hangs-7, slow-0 to slow-19, healthy-0 to healthy-8. ARGS="--acts N" does something smaller: N hangs of
each kind that is acted on without a stopped rank, and N minutes of a healthy run.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from functools import partial

import msgspec
from rich.table import Table

from benchmarks._detect_hangs import ENDLESS, KINDS, SLEEPERS, Trial, hangs
from benchmarks._detect_health import Healthy, healthy
from benchmarks._detect_slow import WINDOW_S, Window, windows
from benchmarks._kept import Kept
from benchmarks._report import FULL, Findings, report

HANG_PARTS, HANGS_EACH = (8, 5) if FULL else (1, 2)  # parts of so many of every kind
SLOW_PARTS, SLOW_EACH = (20, 2) if FULL else (1, 2)
TIMES = {2.0: 0.95, 1.5: 0.95, 1.3: 0.90}  # how slow a rank is -> how often it must be named
HEALTHY_PARTS, HEALTHY_S, SAVE_S = (9, 400.0, 60.0) if FULL else (1, 120.0, 20.0)
NAMED_S, STEPPING_S, RIGHT = 10.0, 12.0, 0.95
ACTED = ("user code", "GIL held", "deadlock", "mismatch")
ACTED_S = {"sleepers": (SLEEPERS, 30.0), "mismatches": (ENDLESS, 8.0)}  # median until it steps again
FALSE = 1 / 40


class Hung(msgspec.Struct, frozen=True):
    trials: list[Trial]


class Slowed(msgspec.Struct, frozen=True):
    windows: list[Window]


def hung(number: int) -> Hung:
    return Hung(hangs(HANGS_EACH, seed=number))


def slowed(number: int) -> Slowed:
    return Slowed(windows([*TIMES, 1.0] * SLOW_EACH, seed=number))


def judge_hangs(trials: list[Trial], table: Table, findings: Findings) -> None:
    for kind in KINDS:
        found = [trial for trial in trials if trial.kind == kind]
        right = [trial for trial in found if trial.right]
        soon = [trial for trial in right if (trial.named_s or 0.0) < NAMED_S]
        took = [trial.named_s for trial in right if trial.named_s is not None]
        stepping = [trial.stepping_s for trial in found if kind == "stopped"]
        acted = f"; stepping again after {spread([s for s in stepping if s])}" if stepping else ""
        table.add_row(f"hang: {kind}", f"{len(right)} of {len(found)} right", f"named after {spread(took)}{acted}")
        key = kind.replace(" ", "_")
        findings.figures |= {f"hang_{key}_trials": len(found), f"hang_{key}_right": len(right)}
        findings.figures |= {f"hang_{key}_named_s": median(took), f"hang_{key}_named_worst_s": max(took, default=None)}
        findings.goals[f"{kind}: right rank and node named in under 10 s"] = len(soon) >= RIGHT * len(found)
        if stepping:
            findings.figures["stopped_stepping_s"] = median([s for s in stepping if s])
            in_time = sum(s is not None and s < STEPPING_S for s in stepping)
            findings.goals["stopped: acted on and stepping again in under 12 s"] = in_time >= RIGHT * len(found)


def judge_acts(trials: list[Trial], table: Table, findings: Findings) -> None:
    for what, (forms, limit_s) in ACTED_S.items():
        stepping = [trial.stepping_s for trial in trials if trial.form in forms]
        took = [s for s in stepping if s is not None]
        table.add_row(f"acted on: {what}", f"{len(took)} of {len(stepping)}", f"stepping again after {spread(took)}")
        findings.figures |= {f"{what}_trials": len(stepping), f"{what}_acted": len(took)}
        findings.figures |= {f"{what}_stepping_s": median(took), f"{what}_stepping_worst_s": max(took, default=None)}
        soon = len(took) >= RIGHT * len(stepping) and statistics.median(took or [limit_s]) < limit_s
        findings.goals[f"{what}: acted on, and stepping again in a median of under {limit_s:g} s"] = soon


def judge_slow(found: list[Window], table: Table, findings: Findings) -> None:
    for times, wanted in TIMES.items():
        here = [one for one in found if one.times == times]
        right = [one for one in here if one.right]
        wrong = sum(bool(one.named) and not one.right for one in here)
        took = spread([one.named_s for one in right if one.named_s is not None])
        table.add_row(f"a rank {times:g} times as slow", f"{len(right)} of {len(here)} right", f"named after {took}")
        findings.figures |= {f"slow_{times:g}_trials": len(here), f"slow_{times:g}_right": len(right)}
        findings.figures |= {f"slow_{times:g}_somebody_else": wrong}
        findings.goals[f"slow {times:g}: named in at least {100 * wanted:.0f} %"] = len(right) >= wanted * len(here)
    calm = [one for one in found if one.times == 1.0]
    false = sum(not one.right for one in calm)
    table.add_row(f"nobody is slow, {WINDOW_S:g} s", f"somebody named in {false} of {len(calm)}", "")
    findings.figures |= {"slow_none_windows": len(calm), "slow_none_named": false}
    findings.goals["no slow rank: somebody named in at most 1 of 40"] = false <= FALSE * len(calm)


def judge_healthy(runs: list[Healthy], table: Table, findings: Findings) -> None:
    stalls = [stall for run in runs for stall in run.stalls]
    mistakes = [mistake for stall in stalls for mistake in stall.mistakes]
    acted = [one for stall in stalls for one in stall.named if one.stance == "act"]
    for kind in dict.fromkeys(stall.kind for stall in stalls):
        here = [stall for stall in stalls if stall.kind == kind]
        named = sum(any(one.ranks for one in stall.named) for stall in here)
        wrong = sum(len(stall.mistakes) for stall in here)
        lasted = spread([stall.ended - stall.began for stall in here])
        said = f"somebody named in {named} of {len(here)}, {wrong} by mistake"
        table.add_row(f"healthy: {kind}", said, f"lasted {lasted}")
        findings.figures[f"healthy_{kind.replace(' ', '_').replace('-', '_')}_named"] = named
    restarts = sum(run.generation - 1 for run in runs)
    seconds, steps = sum(run.seconds for run in runs), sum(run.steps for run in runs)
    table.add_row("healthy runs", f"{seconds / 60:.1f} minutes, {steps} steps", f"{len(acted)} acted on")
    findings.figures |= {
        "healthy_s": round(seconds),
        "healthy_stalls": len(stalls),
        "healthy_acted": len(acted),
        "healthy_mistakes": len(mistakes),
    }
    findings.goals["healthy: nothing acted on"] = not acted and not restarts
    findings.goals["healthy: nobody named by mistake"] = not mistakes
    judge_after([run.after for run in runs], table, findings)


def judge_after(trials: list[Trial], table: Table, findings: Findings) -> None:
    """Hangs in user code after all these pauses, one in each run."""
    right = [trial for trial in trials if trial.right]
    named = [trial.named_s for trial in right if trial.named_s is not None]
    stepping = [trial.stepping_s for trial in trials if trial.stepping_s is not None]
    after = f"named after {spread(named)}, stepping again after {spread(stepping)}"
    table.add_row("a hang in user code after all that", f"{len(right)} of {len(trials)} right", after)
    findings.figures |= {
        "hang_after_pauses_trials": len(trials),
        "hang_after_pauses_named_s": median(named),
        "hang_after_pauses_stepping_s": median(stepping),
    }
    soon = len(right) == len(trials) and max(named, default=NAMED_S) < NAMED_S
    findings.goals["healthy: a hang after its pauses is named in under 10 s"] = soon


def spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "never"
    return f"{statistics.median(seconds):.1f} s (at most {max(seconds):.1f})"


def median(seconds: Sequence[float]) -> float | None:
    return round(statistics.median(seconds), 2) if seconds else None


def stall_s(chance: random.Random) -> float:
    return chance.uniform(8.0, 20.0) if FULL else 8.0


def study_acts(count: int, table: Table) -> None:
    """The part of the study about hangs that are acted on, and about pauses that are not."""
    kept, findings = Kept("detect_acts"), Findings()
    trials = kept.part("hangs", Hung, lambda: Hung(hangs(count, seed=0, of=ACTED))).trials
    judge_acts(trials, table, findings)
    wrong = [trial for trial in trials if not trial.right]
    findings.goals["right rank and node named"] = not wrong
    run = kept.part("healthy", Healthy, partial(healthy, 60.0 * count, 20.0, stall_s, seed=1))
    judge_healthy([run], table, findings)
    findings.figures["load"] = median([trial.load for trial in trials] + [run.load])
    took = {what: [t.stepping_s for t in trials if t.form in forms] for what, (forms, _) in ACTED_S.items()}
    report("detect-acts", table, findings, took)
    kept.forget()


def make_part(kept: Kept, name: str) -> list[Trial] | list[Window] | list[Healthy]:
    what, _, number = name.partition("-")
    seed = int(number)
    if what == "hangs":
        return kept.part(name, Hung, partial(hung, seed)).trials
    if what == "slow":
        return kept.part(name, Slowed, partial(slowed, seed)).windows
    return [kept.part(name, Healthy, partial(healthy, HEALTHY_S, SAVE_S, stall_s, seed=1 + seed))]


PARTS = {"hangs": HANG_PARTS, "slow": SLOW_PARTS, "healthy": HEALTHY_PARTS}
NAMES = [f"{what}-{number}" for what, count in PARTS.items() for number in range(count)]


def study(kept: Kept, table: Table) -> None:
    found = {name: make_part(kept, name) for name in NAMES}
    every = [one for part in found.values() for one in part]
    trials = [one for one in every if isinstance(one, Trial)]
    seen = [one for one in every if isinstance(one, Window)]
    runs = [one for one in every if isinstance(one, Healthy)]
    findings = Findings()
    judge_hangs(trials, table, findings)
    judge_acts(trials, table, findings)
    judge_slow(seen, table, findings)
    judge_healthy(runs, table, findings)
    findings.figures["load"] = median([one.load for one in every])
    findings.skipped["torchrun"] = "not measured: gloo and c10d wait 1,800 s by default, then blame a rank that waited"
    took: dict[str, list[float | None]] = {f"named_s {k}": [t.named_s for t in trials if t.kind == k] for k in KINDS}
    took["stepping_s"] = [trial.stepping_s for trial in trials if trial.kind == "stopped"]
    for what, (forms, _) in ACTED_S.items():
        took[f"stepping_s {what}"] = [trial.stepping_s for trial in trials if trial.form in forms]
    took |= {f"named_s {times:g} times": [one.named_s for one in seen if one.times == times] for times in TIMES}
    report("detect", table, findings, took)
    kept.forget()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--acts", type=int, default=0, metavar="N")
    parser.add_argument("--part", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    args = parser.parse_args()
    table = Table("what was done", "what was found", "", title=(__doc__ or "").partition("\n")[0])
    if args.acts:
        study_acts(args.acts, table)
    elif args.part:
        make_part(Kept("detect"), args.part)
    else:
        study(Kept("detect"), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
