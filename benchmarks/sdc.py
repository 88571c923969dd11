"""Bit flips in one of 4 DDP ranks: which detector sees them, how soon, whom it names, and what it costs.

Faults that leave no trace in any bit after 20 steps are counted apart, and so are harmful ones: those that move the
loss on held-out text by more than three times what other batches do. BENCH_FULL=1 strikes 240 times and runs 10,000
steps without a fault; what it has found is kept in benchmarks/out/, and what was cut short goes on from there.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from rich.table import Table

from benchmarks._report import FULL, Findings, report
from benchmarks._sdc_faults import PLACES
from benchmarks._sdc_rank import EVERY, PIECE, RULES
from examples.gpt import GPT, SIZES, make_text
from holdfast.core.detect.replica import ReplicaLimits, hash_stride

RANKS, WARMUP = 4, 300
TRIALS, PIECES = (240, 10_000 // PIECE) if FULL else (40, 1)
LIMIT_S = 6 * 3600.0 if FULL else 12 * 60.0
HASHES = ("hash parameters", "hash optimizer")
METHODS = ("not finite", *RULES, *HASHES)
NAMING = ("own times", *HASHES)  # the others speak of what all ranks share
GOAL_COST = 0.003


class Trial(msgspec.Struct):
    """What became of one fault, by what each method saw: after how many steps, and which ranks it named."""

    fault: dict[str, Any]
    visible: bool  # some bit is another one after the trial than without the fault
    apart: bool  # and not the same one on all ranks
    deviation: float
    methods: dict[str, tuple[int, list[int]]]


class Clean(msgspec.Struct):
    piece: int
    steps: int
    alarms: dict[str, int]
    spent: dict[str, float]


class Study(msgspec.Struct):
    trials: list[Trial]
    clean: list[Clean]
    noise: float

    @classmethod
    def read(cls, path: Path) -> "Study":
        lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        for line in lines:
            if line.get("deviation", 0.0) is None:  # an infinite one, which JSON has no word for
                line["deviation"] = float("inf")
        return cls(
            trials=[msgspec.convert(line, Trial) for line in lines if "fault" in line],
            clean=[msgspec.convert(line, Clean) for line in lines if "piece" in line],
            noise=next(line["noise"] for line in lines if "noise" in line),
        )


def conduct(folder: Path) -> Study:
    """Run all ranks to their end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    root = Path(__file__).parents[1]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "WORLD_SIZE": str(RANKS)}
    sizes = [f"--warmup={WARMUP}", f"--clean={PIECES}", f"--trials={TRIALS}"]
    command = [sys.executable, str(Path(__file__).with_name("_sdc_rank.py")), f"--folder={folder}", *sizes]
    ranks = [subprocess.Popen(command, env={**environ, "RANK": str(rank)}) for rank in range(RANKS)]
    try:
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    return Study.read(folder / "trials.jsonl")


def rate(trials: list[Trial], method: str) -> str:
    return f"{sum(method in trial.methods for trial in trials)}/{len(trials)}" if trials else "-"


def spent(study: Study, what: str) -> float:
    """Processor time of one step, or of one hash, of one rank."""
    every = EVERY if what in ("parameters", "optimizer") else 1
    return sum(one.spent[what] for one in study.clean) * every / (RANKS * sum(one.steps for one in study.clean))


def hashing(study: Study, what: str) -> tuple[int, float]:
    """Every how many steps a rank would hash this itself, and which part of its time that is."""
    train_s, hash_s = spent(study, "train"), spent(study, what)
    steps = hash_stride(ReplicaLimits(), hash_s, train_s)
    return steps, hash_s / (steps * train_s)


def outside(study: Study) -> float:
    """The same for all of the state, where the agent does it: of a core, not of the rank's time."""
    size = sum(parameter.nbytes for parameter in GPT(len(set(make_text())), SIZES["small"]).parameters())
    state = memoryview(bytearray(3 * size))  # and two moments of each
    began = time.thread_time()
    for _ in range(100):
        xxhash.xxh3_64_intdigest(state)
    return (time.thread_time() - began) / 100 / (EVERY * spent(study, "train"))


def cost(study: Study, method: str) -> str:
    if method in HASHES:
        steps, share = hashing(study, method.removeprefix("hash "))
        return f"{share:.2%}, every {steps}"
    watched = method == "update" or method.startswith("own")
    return f"{spent(study, 'watch' if watched else 'rules') / spent(study, 'train'):.2%}"


def row(study: Study, method: str) -> list[str]:
    visible = [trial for trial in study.trials if trial.visible]
    harmful = [trial for trial in visible if trial.deviation > 3 * study.noise]
    places = [rate([trial for trial in visible if trial.fault["place"] == place], method) for place in PLACES]
    found = [trial for trial in visible if method in trial.methods]
    delays = sorted(trial.methods[method][0] for trial in found)
    right = sum(trial.methods[method][1] == [trial.fault["rank"]] for trial in found)
    false = sum(one.alarms["hash" if method in HASHES else method] for one in study.clean)
    steps = sum(one.steps for one in study.clean)
    return [
        method,
        *places,
        rate(harmful, method),
        f"{statistics.median(delays):g}, {delays[-1]}" if delays else "-",
        f"{right}/{len(found)}" if method in NAMING and found else "-",
        f"{1e4 * false / steps:.1f}",
        cost(study, method) if method != "not finite" else "0",
    ]


def judge(study: Study, findings: Findings) -> None:
    visible = [trial for trial in study.trials if trial.visible]
    harmful = [trial for trial in visible if trial.deviation > 3 * study.noise]
    apart = [trial for trial in visible if trial.apart]
    hashed = [t for t in apart if t.methods.keys() & set(HASHES)]
    named = [t for t in hashed if all(t.methods[h][1] == [t.fault["rank"]] for h in HASHES if h in t.methods)]
    seen = sum(bool(trial.methods) for trial in harmful)
    hash_cost, train_s = hashing(study, "parameters")[1], spent(study, "train")
    findings.figures |= {
        "injections": len(study.trials),
        "visible": len(visible),
        "apart": len(apart),
        "harmful": len(harmful),
        "harmful_seen_by_any": seen / len(harmful) if harmful else None,
        "hash_recall": len(hashed) / len(apart) if apart else None,
        "hash_named_right": len(named) / len(hashed) if hashed else None,
        "hash_cost": round(hash_cost, 6),
        "hash_cost_in_agent": round(outside(study), 6),
        "rules_cost": round(spent(study, "rules") / train_s, 6),
        "watch_cost": round(spent(study, "watch") / train_s, 4),
        "watch_over_optimizer_step": round(spent(study, "watch") / spent(study, "update"), 3),
        "clean_steps": sum(one.steps for one in study.clean),
    }
    for method in METHODS:
        caught = sum(method in trial.methods for trial in visible)
        findings.figures[f"recall {method}"] = round(caught / len(visible), 4)
    findings.goals["replicas that differ after a trial have always been found"] = len(hashed) == len(apart)
    findings.goals["and the right rank is always named"] = len(named) == len(hashed)
    findings.goals["hashes never differ without a fault"] = not any(one.alarms["hash"] for one in study.clean)
    findings.goals["hashing parameters costs a rank under 0.3 % of its time"] = hash_cost < GOAL_COST


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as beside:
        study = conduct(Path(__file__).parent / "out" / "sdc" if FULL else Path(beside))
    title = f"{(__doc__ or '').partition(chr(10))[0]} Hashes every {EVERY} steps; seen of visible faults by place."
    table = Table("method", *PLACES, "harmful", "steps (median, most)", "named", "false in 10,000", "cost", title=title)
    for method in METHODS:
        table.add_row(*row(study, method))
    findings = Findings()
    judge(study, findings)
    unseen = [t for t in study.trials if t.visible and t.fault["place"] == PLACES[-1] and not t.methods]
    print(
        f"{len(unseen)} faults in gradients before the sum were seen by nobody: they are the same on all replicas. The"
        " norm of a rank's own gradient sees the large ones; all of them only a second computation of the same batch."
    )
    report("sdc", table, findings)


if __name__ == "__main__":
    main()
