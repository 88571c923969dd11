"""make bench-words: what last words tell: how much of the labelled logs is understood, and how fast logs are read.

The logs in tests/corpus/ours and tests/corpus/outside may be looked at while rows are written, those in
tests/corpus/held may not: of these only totals are shown. Those in tests/corpus/sealed.zip are judged only with
--sealed, once the rows are written: whoever mends what they show has no forecast left. Of them, too, only totals are
shown, and they are unpacked only for the time that it takes. A long log is one of a job that went well until its end,
with what ranks write by the gigabyte; a small one is what people paste.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks import _words_corpus
from benchmarks._report import Findings, median, report
from benchmarks._words_corpus import CORPUS, Judged, judged, score
from benchmarks._words_learned import measure_learned
from benchmarks._words_model import measure_opinions
from holdfast.agent.rank import last_words
from holdfast.agent.rank.last_words_judge import warm_catalog
from holdfast.core.detect.crash import alarm_of
from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.logs import catalog_files
from holdfast.model.observation import Exit

GIB = 1 << 30
TAIL_BYTES = 1 << 20
SEEDED_LINES = 20_000  # drawn once, then written again and again with other numbers
CORPORA = ("ours", "held", "outside")
SEALED = CORPUS / "sealed.zip"
GOALS = {
    "held": {"klass": 0.92, "group": 0.96, "action": 0.95, "first_cause": 0.95, "evict_precision": 0.98},
    "sealed": {"klass": 0.92, "group": 0.95, "action": 0.92, "evict_precision": 1.0},
}
LONG_S, LONG_BYTES, TAIL_S, SMALL_CPU_S = 20.0, 200 << 20, 0.050, 0.3
SMALL_RUNS = 7
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


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has ended: what it printed and used."""

    printed: bytes
    took_s: float
    cpu_s: float
    peak_bytes: int


def run_python(*args: str) -> Run:
    """Run this interpreter on its own, as after an installation: it keeps the modules that it has compiled."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *args], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1], env=env)
    assert process.stdout is not None
    with process.stdout as pipe:
        printed = pipe.read()
    _, status, usage = os.wait4(process.pid, 0)
    took_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    return Run(printed=printed, took_s=took_s, cpu_s=cpu_s, peak_bytes=usage.ru_maxrss << 10)


def read_long(size: int, seed: int) -> tuple[Run, bool]:
    """Diagnose a log of this size; return the run, and whether the end was understood."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        path = Path(folder) / "job.log"
        write(path, size, seed)
        run = run_python("-m", "holdfast.cli", "diagnose", str(path), "--json")
    found = msgspec.json.decode(run.printed)
    return run, (found["class"], found["root_rank"]) == ("python_exception", 3)


def read_small() -> tuple[float, float]:
    """Processor seconds of `holdfast diagnose` of a few lines, and of an interpreter that does nothing."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        path = Path(folder) / "job.log"
        path.write_text(END)
        small = median([run_python("-m", "holdfast.cli", "diagnose", str(path)).cpu_s for _ in range(SMALL_RUNS)])
    nothing = median([run_python("-c", "pass").cpu_s for _ in range(SMALL_RUNS)])
    return small or 0.0, nothing or 0.0


def read_tail(seed: int) -> float:
    """Seconds from a rank's end to its alarm, with all that it may have said."""
    known = warm_catalog(catalog_files.load_failures())
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


def judge_archive(archive: Path, known: FailureCatalog) -> list[Judged]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder, zipfile.ZipFile(archive) as logs:
        logs.extractall(folder)
        return list(judged(Path(folder), known))


def add_score(table: Table, findings: Findings, corpus: str, cases: list[Judged]) -> None:
    """Add the totals of a corpus, and nothing that tells one of its logs."""
    if not cases:
        findings.skipped[corpus] = "there are no such logs here"
        return
    goals = GOALS.get(corpus, {})
    for name, value in msgspec.structs.asdict(score(cases)).items():
        findings.figures[f"{corpus}_{name}"] = round(value, 4)
        goal = goals.get(name)
        if goal is not None:
            findings.goals[f"{name} of {corpus}"] = value >= goal
        shown = f"{value:.1%}" if isinstance(value, float) else str(value)
        table.add_row(f"{corpus}: {name.replace('_', ' ')}", shown, f">= {goal:.0%}" if goal else "")
    if hasattr(_words_corpus, "reliability"):
        for one in _words_corpus.reliability(cases):
            sure = f"{one.below - 0.1:.0%} to {one.below:.0%} sure"
            findings.figures[f"{corpus}_right_below_{one.below:.1f}"] = round(one.right, 4)
            table.add_row(f"{corpus}: right of {one.count} that are {sure}", f"{one.right:.1%}", "")


def add_speed(table: Table, findings: Findings, gib: float, seed: int) -> None:
    tail_s = median([read_tail(seed + n) for n in range(5)]) or 0.0
    small_s, nothing_s = read_small()
    long, right = read_long(int(gib * GIB), seed)
    findings.figures |= {
        "tail_s": round(tail_s, 4),
        "small_cpu_s": round(small_s, 3),
        "nothing_cpu_s": round(nothing_s, 3),
        "long_s": round(long.took_s, 2),
        "long_cpu_s": round(long.cpu_s, 2),
        "peak_mib": long.peak_bytes >> 20,
    }
    findings.goals |= {
        "tail": tail_s < TAIL_S,
        "small": small_s < SMALL_CPU_S,
        "time": long.took_s < LONG_S,
        "memory": long.peak_bytes < LONG_BYTES,
        "end": right,
    }
    table.add_row("alarm of a rank that said 1 MiB", f"{tail_s * 1000:.0f} ms", f"< {TAIL_S * 1000:.0f} ms")
    beside = f"{small_s:.2f} s of a core (python alone: {nothing_s:.2f} s)"
    table.add_row("a small log", beside, f"< {SMALL_CPU_S:g} s of a core")
    table.add_row(f"a log of {gib:g} GiB", f"{long.took_s:.1f} s ({long.cpu_s:.1f} s of a core)", f"< {LONG_S:.0f} s")
    table.add_row("peak memory", f"{long.peak_bytes >> 20} MiB", f"< {LONG_BYTES >> 20} MiB")


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the long log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", action="append", choices=CORPORA, help="labelled logs to judge (default: all)")
    what = "judge the sealed logs as well (default: those of this repository)"
    parser.add_argument("--sealed", type=Path, nargs="?", const=SEALED, metavar="ARCHIVE", help=what)
    parser.add_argument("--learned", action="store_true", help="measure learned words alone, for a record of their own")
    parser.add_argument("--opinions", action="store_true", help="measure opinions alone, for a record of their own")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_flags()
    table = Table("what", "measured", "goal", title="last words")
    findings = Findings()
    known = catalog_files.load_failures()
    if args.opinions:
        measure_opinions(table, findings, known)
        report("opinions", table, findings)
        return
    if args.learned:
        measure_learned(table, findings)
        report("words-learned", table, findings)
        return
    for corpus in args.corpus or CORPORA:
        add_score(table, findings, corpus, list(judged(CORPUS / corpus, known)))
    if args.sealed:
        add_score(table, findings, "sealed", judge_archive(args.sealed, known))
    measure_opinions(table, findings, known)
    measure_learned(table, findings)
    add_speed(table, findings, args.gib, args.seed)
    report("words", table, findings)


if __name__ == "__main__":
    main()
