"""Replays that name a faulty machine: live, with one rank on each of 6 and 12 processes, beside what is reckoned.

A fault is a bit flipped (or a NaN) in what leaves one node, in a part q of its replays. It has to be named by
signatures, with the same code that runs at 1,200 nodes in the simulator. BENCH_FULL=1 strikes four times as often.
"""

import multiprocessing
import tempfile
import time
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._replay_rank import STEPS, Case, Result, run
from benchmarks._report import FULL, Findings, report
from holdfast.core.replay import detection_odds
from holdfast.sim.replay_study import ReplaySetup, ReplayStudy, run_study

MORE = 4 if FULL else 1
LIMIT_S = 720.0 * MORE
SURE = 3.0  # of some ten intervals of 95 % one may well miss: a goal is missed where even 99.7 % does not reach
BY_RULE = 0.95


def cases(stages: int) -> list[Case]:
    """Repeats by the rule for the wanted confidence, and fewer, where it must fail as often as reckoned."""
    found = [Case(way="dual", stages=stages, q=0.0, most=3, trials=20 * MORE)]
    for q, most, trials in ((1.0, 1, 100), (0.5, 1, 200), (0.5, 6, 100), (0.2, 3, 200), (0.2, 17, 80)):
        found.append(Case(way="dual", stages=stages, q=q, most=most, trials=trials * MORE))
    found.append(Case(way="halves", stages=stages, q=0.0, most=10, trials=10 * MORE))
    for q, most, trials in ((1.0, 1, 60), (0.5, 6, 80), (0.2, 17, 60)):
        found.append(Case(way="halves", stages=stages, q=q, most=most, trials=trials * MORE))
    return found


def live(folder: Path, world: int, chosen: list[Case]) -> list[Result]:
    """Run all processes to their end; they are forked, so that torch is imported once, by one that has no threads."""
    fork = multiprocessing.get_context("fork")
    nodes = [fork.Process(target=run, args=(rank, world, folder, chosen)) for rank in range(world)]
    for node in nodes:
        node.start()
    until = time.monotonic() + LIMIT_S
    try:
        for node in nodes:
            node.join(max(0.0, until - time.monotonic()))
    finally:
        for node in nodes:
            if node.is_alive():
                node.kill()
            node.join()
    codes = [node.exitcode for node in nodes]
    if any(codes):
        raise RuntimeError(f"nodes ended with {codes}")
    return msgspec.json.decode((folder / f"results-{world}.json").read_bytes(), type=list[Result])


def reckoned(case: Case) -> float:
    if case.way == "dual":
        return detection_odds.dual_phase_odds(case.q, case.most)
    return detection_odds.shown_odds(detection_odds.step_odds(case.q, STEPS), 2 * STEPS * case.most)


def row(world: int, result: Result) -> list[str]:
    case = result.case
    low, high = detection_odds.wilson_interval(result.named, case.trials)
    others = f"{result.held} in a set, {result.nobody} nobody, {result.wrong} wrong"
    what = "nobody struck" if case.q == 0 else f"{result.named / case.trials:.3f} [{low:.3f}, {high:.3f}]"
    return [
        f"{world} nodes" + (f", {case.stages} stages" if case.stages > 1 else ""),
        case.way,
        f"{case.q:g}",
        str(case.most),
        what,
        f"{reckoned(case):.3f}" if case.q else "",
        others,
        f"{result.steps:.1f}",
        f"{1000 * result.seconds / case.trials:.0f} ms",
    ]


def judge(found: list[tuple[int, Result]], simulated: ReplayStudy, findings: Findings) -> None:
    struck = [(world, one) for world, one in found if one.case.q]
    inside = outside = 0
    for world, one in struck:
        low, high = detection_odds.wilson_interval(one.named, one.case.trials)
        inside += low <= reckoned(one.case) <= high
        low, high = detection_odds.wilson_interval(one.named, one.case.trials, SURE)
        outside += not low <= reckoned(one.case) <= high
        name = f"{one.case.way} {world} nodes {one.case.stages} stages q={one.case.q:g} R={one.case.most}"
        findings.figures[name] = round(one.named / one.case.trials, 4)
        findings.figures[f"{name}, reckoned"] = round(reckoned(one.case), 4)
        findings.figures[f"{name}, steps"] = round(one.steps, 2)
    trials = sum(one.case.trials for _, one in found)
    wrong = sum(one.wrong for _, one in found)
    false = sum(one.case.trials - one.nobody for _, one in found if not one.case.q)
    sim_inside = sum(rate.agrees for line in simulated.lines for rate in (line.dual, line.halves))
    findings.figures |= {
        "trials": trials,
        "wrongly named": wrong,
        "live within 95 % of what is reckoned": f"{inside} of {len(struck)}",
        "simulated within 95 % of what is reckoned": f"{sim_inside} of {2 * len(simulated.lines)}",
    }
    for crossing in simulated.crossings:
        findings.figures[f"crossover, replays of {crossing.steps} steps"] = crossing.with_launches
    findings.goals["live success is (1-(1-q)^R)^2 within its interval"] = outside == 0
    misjudged = sum(one.misjudged for _, one in found)
    findings.figures["groups and steps misjudged"] = misjudged
    findings.goals["every flip is seen, and nothing else"] = misjudged == 0
    findings.goals["nobody is named without a fault"] = false == 0
    findings.goals["nobody is ever wrongly named"] = wrong == 0
    findings.goals["at 1,200 nodes the same"] = all(
        _near(rate.found, rate.trials, rate.reckoned) for line in simulated.lines for rate in (line.dual, line.halves)
    )


def _near(found: int, trials: int, wanted: float) -> bool:
    low, high = detection_odds.wilson_interval(found, trials, SURE)
    return low <= wanted <= high


def main() -> None:
    found: list[tuple[int, Result]] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        for world, stages in ((6, 1), (12, 2)):
            found += [(world, one) for one in live(Path(folder), world, cases(stages))]
    simulated = run_study(ReplaySetup(trials=150 * MORE), (1.0, 0.5, 0.2, 0.1))
    table = Table(title=f"{(__doc__ or '').partition(chr(10))[0]} Replays of {STEPS} steps.")
    for column in ("job", "way", "q", "repeats", "named, 95 %", "reckoned", "else", "steps", "a trial"):
        table.add_column(column, justify="left" if column in ("job", "way", "else") else "right")
    for world, result in found:
        table.add_row(*row(world, result))
    for line in simulated.lines:
        for way, rate, steps in (("dual", line.dual, line.dual_steps), ("halves", line.halves, line.halves_steps)):
            what = f"{rate.found / rate.trials:.3f} [{rate.low:.3f}, {rate.high:.3f}]"
            shown = (f"{line.q:g}", str(line.repeats), what, f"{rate.reckoned:.3f}", "", f"{steps:.1f}", "")
            table.add_row(f"{simulated.setup.nodes} nodes, simulated", way, *shown)
    findings = Findings()
    judge(found, simulated, findings)
    report("replay", table, findings)


if __name__ == "__main__":
    main()
