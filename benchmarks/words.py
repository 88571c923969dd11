"""make bench-words: what last words tell: how much of the labelled logs is understood, and how fast a long one is read.

The logs in tests/corpus/ours were looked at while the rows were written, those in tests/corpus/held were not: of these
only totals are shown. A long log is one of a job that went well until its end, with what ranks write by the gigabyte.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._report import Findings, median, report
from benchmarks._words_corpus import CORPUS, Score, judged, score
from holdfast.agent.rank import last_words
from holdfast.core.detect.crash import alarm_of
from holdfast.logs import catalog_files
from holdfast.model.observation import Exit

GIB = 1 << 30
TAIL_BYTES = 1 << 20
SEEDED_LINES = 20_000  # drawn once, then written again and again with other numbers
GOALS = {"klass": 0.92, "group": 0.96, "action": 0.95, "first_cause": 0.95, "evict_precision": 0.98}
LONG_S, LONG_BYTES, TAIL_S = 20.0, 200 << 20, 0.050
END = """[rank3]: Traceback (most recent call last):
[rank3]:   File "/workspace/train.py", line 88, in <module>
[rank1]: Traceback (most recent call last):
[rank3]:   File "/workspace/model.py", line 12, in forward
[rank1]:   File "/workspace/train.py", line 90, in <module>
[rank3]:     return x / 0
[rank3]: ZeroDivisionError: division by zero
[rank1]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2401
"""


def line(rng: random.Random, number: int) -> str:
    """What ranks write: steps, bars, warnings that mean nothing, and now and then something never said before."""
    rank, chance = number % 64, rng.random()
    at = f"2026-05-01 {number // 3600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d},{rng.randrange(1000):03d}"
    if chance < 0.10:
        done = number % 100
        bar = "#" * (done // 10)
        return f"Epoch 3: {done:3d}%|{bar:<10}| {number}/500000 [01:10<01:37, {rng.random() * 9:.2f}it/s]\r"
    if chance < 0.15:
        name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=24))
        return f"[rank{rank}]: loaded shard {name}-{rng.getrandbits(64):016x}.arrow in {rng.random():.3f} s"
    if chance < 0.16:
        return f"{at} [rank{rank}] WARNING data: token mismatch in sample {number}, skipping it"
    return (
        f"{at} [rank{rank}] INFO train: iteration {number}/500000 | consumed samples: {number * 512} | loss: "
        f"{rng.random() * 10:.4f} | lr: {rng.random():.3e} | grad norm: {rng.random():.3f} | tokens/s: {number}"
    )


def write(path: Path, size: int, seed: int) -> None:
    rng = random.Random(seed)
    with path.open("wb") as file:
        number = 0
        while file.tell() < size - len(END):
            number += SEEDED_LINES
            text = "\n".join(line(rng, number + n) for n in range(SEEDED_LINES))
            block = text.encode()
            for _ in range(8):  # drawing is slower than reading
                block = block.translate(bytes.maketrans(b"0123456789", b"1234567890"))
                file.write(block + b"\n")
        file.write(END.encode())


def read_long(size: int, seed: int) -> tuple[float, float, int, bool]:
    """Seconds, of them on a processor, peak memory, and whether the end was understood, of a process of its own."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        path = Path(folder) / "job.log"
        write(path, size, seed)
        start = time.perf_counter()
        command = [sys.executable, "-m", "holdfast.cli", "diagnose", str(path), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
        assert process.stdout is not None
        found = msgspec.json.decode(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        took_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    return took_s, cpu_s, usage.ru_maxrss << 10, (found["class"], found["root_rank"]) == ("python_exception", 3)


def read_tail(seed: int) -> float:
    """Seconds from a rank's end to its alarm, with all that it may have said."""
    known = catalog_files.load_failures()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        text = "\n".join(line(rng, n) for n in range(10_000)).encode()[-TAIL_BYTES // 2 :]
        for name in ("stdout.log", "stderr.log"):
            (Path(folder) / name).write_bytes(text + END.encode())
        start = time.perf_counter()
        said = last_words.last_words(Path(folder))
        alarm = alarm_of(Exit(node="n1", generation=1, rank=3, code=1, at=0.0, words=said), known)
        took_s = time.perf_counter() - start
    assert alarm.klass == "python_exception"
    return took_s


def add_score(table: Table, findings: Findings, half: str, found: Score) -> None:
    for name, value in msgspec.structs.asdict(found).items():
        findings.figures[f"{half}_{name}"] = round(value, 4)
        goal = GOALS.get(name)
        if goal is not None and half == "held":
            findings.goals[f"{name} of held"] = value >= goal
        shown = f"{value:.1%}" if isinstance(value, float) else str(value)
        table.add_row(f"{half}: {name.replace('_', ' ')}", shown, f">= {goal:.0%}" if goal else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the long log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--half", action="append", choices=("ours", "held"), help="of the logs (default: both)")
    args = parser.parse_args()
    table = Table("what", "measured", "goal", title="last words")
    findings = Findings()
    known = catalog_files.load_failures()
    for half in args.half or ("ours", "held"):
        cases = list(judged(CORPUS / half, known))
        if cases:
            add_score(table, findings, half, score(cases))
        else:
            findings.skipped[half] = "there are no such logs here"
    tail_s = median([read_tail(args.seed + n) for n in range(5)]) or 0.0
    long_s, cpu_s, peak, right = read_long(int(args.gib * GIB), args.seed)
    findings.figures |= {
        "tail_s": round(tail_s, 4),
        "long_s": round(long_s, 2),
        "long_cpu_s": round(cpu_s, 2),
        "peak_mib": peak >> 20,
    }
    findings.goals |= {"tail": tail_s < TAIL_S, "time": long_s < LONG_S, "memory": peak < LONG_BYTES, "end": right}
    table.add_row("alarm of a rank that said 1 MiB", f"{tail_s * 1000:.0f} ms", f"< {TAIL_S * 1000:.0f} ms")
    table.add_row(f"a log of {args.gib:g} GiB", f"{long_s:.1f} s ({cpu_s:.1f} s of a core)", f"< {LONG_S:.0f} s")
    table.add_row("peak memory", f"{peak >> 20} MiB", f"< {LONG_BYTES >> 20} MiB")
    report("words", table, findings)


if __name__ == "__main__":
    main()
