"""State that survives, under torture: SIGKILLs in every part of a save, a restless reader, storage that fails.

BENCH_FULL=1 does the whole study in parts, each kept in benchmarks/out/ when it is done: what was cut short goes on
from there.
"""

import sys
from collections import Counter
from functools import partial

import msgspec
from rich.table import Table

from benchmarks._kept import Kept
from benchmarks._report import FULL, Findings, report
from benchmarks._torture_kills import KINDS, Trial, kills
from benchmarks._torture_looks import Seen, looks
from benchmarks._torture_storage import Grown, Outage, storage

ROUNDS, PER_ROUND = (5, 26) if FULL else (1, 26)
SAVES = 1000
OUTAGES = [("hang", 60.0), ("eio", 10.0), ("enospc", 10.0)]
REPEATS = 3 if FULL else 1
GROWTH_BYTES = 4 << 20  # two large pages, which come and go: a process that has no more after 100 saves does not grow
SLOWER = 1.02
PARTS = ("train", "copy", "copied", "sealed", "restore")  # that a killed rank must have been seen in


class Kills(msgspec.Struct, frozen=True, kw_only=True):
    """One round."""

    trials: list[Trial]
    steps: int
    compared: int  # states of one rank after one step, held against the undisturbed run
    differing: int


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    outages: list[Outage]
    grown: list[Grown]
    memory_over_two_states: float


def killed(number: int) -> Kills:
    kinds = [KINDS[(number * PER_ROUND + turn) % len(KINDS)] for turn in range(PER_ROUND)]
    trials, found = kills(kinds, seed=number)
    return Kills(trials=trials, **found)


def troubled() -> Trouble:
    outages, grown, kept = storage(OUTAGES, saves=100)
    return Trouble(outages=outages, grown=grown, memory_over_two_states=kept)


def judge_kills(rounds: list[Kills], table: Table, findings: Findings) -> None:
    trials = [trial for one in rounds for trial in one.trials]
    for kind in KINDS:
        found = [trial for trial in trials if trial.kind == kind]
        phases = Counter(phase for trial in found for phase in trial.phases)
        seen = ", ".join(f"{phase} {count}" for phase, count in sorted(phases.items()))
        good = sum(not trial.fault for trial in found)
        lost = max((trial.lost for trial in found), default=0)
        table.add_row(f"SIGKILL: {kind}", seen, f"{good} of {len(found)} restored, at most {lost} steps lost")
    phases = Counter(phase for trial in trials for phase in trial.phases)
    good = sum(not trial.fault for trial in trials)
    differing, compared = sum(one.differing for one in rounds), sum(one.compared for one in rounds)
    table.add_row("states beside the undisturbed run", f"{compared} compared", f"{differing} differ")
    findings.figures |= {"kills": len(trials), "kills_restored": good, "states_compared": compared}
    findings.figures |= {f"killed_in_{phase}": count for phase, count in sorted(phases.items())}
    findings.goals["every kill restored at or after the last sealed step"] = good == len(trials)
    findings.figures["kills_that_lost_more_than_a_step"] = sum(trial.lost > 1 for trial in trials)
    findings.goals["at most 1 step lost by any kill"] = all(trial.lost <= 1 for trial in trials)
    findings.goals["every part of a save was hit"] = all(phases[part] for part in PARTS)
    findings.goals["bit-exact after every kill"] = differing == 0


def judge_looks(seen: Seen, table: Table, findings: Findings) -> None:
    found = f"{seen.looks} whole snapshots read, {seen.moved} overtaken"
    table.add_row(f"{seen.saves} saves, spoilt at once", found, f"{seen.torn} torn, {seen.stale} stale")
    findings.figures |= {"looks": seen.looks, "torn": seen.torn, "stale": seen.stale}
    findings.goals["none torn, none stale"] = not seen.torn and not seen.stale


def judge_trouble(troubles: list[Trouble], table: Table, findings: Findings) -> None:
    for outage in (outage for one in troubles for outage in one.outages):
        what = f"steps {100 * (outage.ratio - 1):+.1f} % +- {100 * outage.error:.1f} %"
        then = f"killed meanwhile: {outage.lost} lost, from {outage.source}; written again after {outage.back_s:.1f} s"
        table.add_row(f"storage: {outage.fault} for {outage.seconds:g} s", what, then)
        findings.figures[f"{outage.fault}_over_calm"] = outage.ratio
        findings.figures[f"{outage.fault}_error"] = outage.error
        name = f"{outage.fault}: at most 1 step lost, from memory, and a person was told"
        met = outage.lost <= 1 and outage.source == "memory" and outage.said
        findings.goals[name] = findings.goals.get(name, True) and met
        name = f"{outage.fault}: steps at most 2 % slower"
        if outage.error > SLOWER - 1:
            findings.skipped[name] = f"the machine was too busy to tell: {what}"
        else:
            findings.goals[name] = findings.goals.get(name, True) and outage.ratio - outage.error <= SLOWER
    most = max((grown for one in troubles for grown in one.grown), key=lambda grown: grown.memory_bytes)
    growing = [grown for one in troubles for grown in one.grown if grows(grown)]
    table.add_row(f"memory over {most.saves} saves", f"most: {most.who} {most.memory_bytes / 1024:+.0f} KiB", "")
    kept = max(one.memory_over_two_states for one in troubles)
    table.add_row("memory of two slots over the state", f"{kept:.3f}", "")
    findings.figures |= {"most_growth_bytes": most.memory_bytes, "memory_of_two_slots_over_state": round(kept, 4)}
    findings.goals["nothing grows over 100 saves"] = not growing


def grows(grown: Grown) -> bool:
    """Threads and files come and go with a write that happens to be under way; memory does too, in small pieces."""
    return grown.memory_bytes > GROWTH_BYTES or grown.files > 8 or grown.threads > 8


def main() -> int:
    kept = Kept("torture")
    findings = Findings()
    title = (__doc__ or "").partition("\n")[0]
    table = Table("what was done", "what was hit or seen", "what became of it", title=title)
    rounds = [kept.part(f"kills-{number}", Kills, partial(killed, number)) for number in range(ROUNDS)]
    judge_kills(rounds, table, findings)
    judge_looks(kept.part("looks", Seen, lambda: looks(SAVES)), table, findings)
    troubles = [kept.part(f"storage-{number}", Trouble, troubled) for number in range(REPEATS)]
    judge_trouble(troubles, table, findings)
    took: list[float | None] = [trial.took_s for one in rounds for trial in one.trials]
    report("torture", table, findings, {"restored_s": took})
    kept.forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())
