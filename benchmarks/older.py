"""What recovery, state and ingest cost now, beside an older commit: each by its own code, in turns.

`make bench-older ARGS=COMMIT` takes that commit's tree out of git; a folder that holds one does as well. Names of parts
may follow: restart, save, storage, restore, peer, ingest.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks._report import FULL, Findings, report

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = int(os.environ.get("BENCH_ROUNDS") or (6 if FULL else 2))
WORSE = 1.05  # a figure may be so many times the older one
LIMIT_S = 300.0
FOLDERS = ("holdfast", "benchmarks", "examples")

# What either tree runs: names that both of them have. Each prints lists of seconds, or of ratios to a bare copy; less
# is better in all of them.
PARTS = {
    "restart": """
from benchmarks import restart
def ranks():
    with restart.Job(4) as job:
        job.start(restart.holdfast(job.folder / "run", "--standalone", "--nproc-per-node=4", "--max-restarts=20"))
        restart.warm_up(job)
        time.sleep(15)  # until there is a zygote to fork from, whose making the trees put at different moments
        for number in range(9):  # never at the same step, and not one rank again: that is how a bug strikes
            fault = job.fault()
            job.kill(job.pid_of(1 + number % 3))
            yield restart.recovery(job, fault, restart.RANK_WAIT_S)
            job.wait_steps(10 + 5 * number, fault)
print(json.dumps({"rank lost, s": [*ranks()], "node lost, s": restart.lose_holdfast_node()}))
""",
    "save": """
from benchmarks import _ckpt_io, _ckpt_stall
with folder() as name:
    found = {}
    for ranks in (1, 2):
        took = _ckpt_stall.measure("", ranks, Path(name).resolve()).took
        found[f"by {ranks} / memory copy"] = _ckpt_io.ratio(took, _ckpt_stall.OURS, _ckpt_stall.COPY)[1]
print(json.dumps(found))
""",
    "storage": """
from benchmarks import _ckpt_io
with folder() as name:
    sides = _ckpt_io.measure(Path(name).resolve())
pairs = {"checkpoint / raw write": ("persist", "raw write"), "load / raw read": ("load", "raw read")}
print(json.dumps({name: _ckpt_io.ratio(sides, *pair)[1] for name, pair in pairs.items()}))
""",
    "restore": """
from benchmarks import _ckpt_restore
with folder() as name:
    found = _ckpt_restore.measure(Path(name).resolve())
print(json.dumps({"/ copy into fresh memory": [one.restore_s / one.fresh_s for one in found]}))
""",
    "peer": """
from benchmarks import _ckpt_io, _ckpt_peer
copies = _ckpt_peer.measure()
print(json.dumps({f"{way} / bare copy": _ckpt_io.ratio(copies, way, "raw")[1] for way in ("push", "pull")}))
""",
    "ingest": """
from benchmarks import ingest
ingest.main()
""",
}
_IMPORTS = """import json, os, tempfile, time
from pathlib import Path
folder = lambda: tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=os.environ.get("BENCH_DIR", "."))
"""
_INGEST = {"lag_p50_ms": "loop's lag p50, ms", "lag_p99_ms": "loop's lag p99, ms", "busy": "core busy, share"}

Figures = dict[str, list[float]]


def measure(tree: Path, part: str) -> Figures:
    """One part by the code of that tree."""
    # The path goes before what is installed, and to every process below.
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS + PARTS[part]],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "BENCH_FULL": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{part} of {tree} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if part == "ingest":
        return {said: [found["figures"][name]] for name, said in _INGEST.items()}
    return msgspec.convert(found, Figures)


def compare(older: Path, newer: Path, parts: list[str]) -> tuple[Figures, Figures]:
    """All figures of both trees; who begins changes from round to round."""
    sides: tuple[tuple[Path, Figures], ...] = ((older, {}), (newer, {}))
    for part in parts:
        for turn in range(ROUNDS):
            for tree, figures in sides if turn % 2 == 0 else sides[::-1]:
                found = {f"{part}: {name}": values for name, values in measure(tree, part).items()}
                figures |= {name: figures.get(name, []) + values for name, values in found.items()}
                print(f"{part}, round {turn + 1} of {ROUNDS}: {'now' if tree is newer else 'older'}", file=sys.stderr)
    return sides[0][1], sides[1][1]


def judge(before: Figures, now: Figures, commit: str) -> tuple[Table, Findings]:
    table = Table(
        "what", "then, median", "now, median", "now / then", "goal", title=f"Beside {commit}, {ROUNDS} rounds in turns"
    )
    findings = Findings(figures={"older": commit, "rounds": ROUNDS})
    for name, values in now.items():
        then, today = statistics.median(before[name]), statistics.median(values)
        key = name.replace(": ", "_").replace(" / ", "_over_").replace(", ", "_").replace(" ", "_").replace("'", "")
        findings.figures[f"{key}_then"], findings.figures[key] = round(then, 4), round(today, 4)
        findings.figures[f"{key}_ratio"] = round(today / then, 3)
        findings.goals[key] = today <= WORSE * then
        table.add_row(name, f"{then:.3f}", f"{today:.3f}", f"{today / then:.2f}", f"at most {WORSE:g}")
    return table, findings


def tree_of(commit: str, base: Path) -> Path:
    """What git has at that commit."""
    archive = subprocess.run(["git", "archive", commit, *FOLDERS], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        sys.exit(f"bench-older: git has no tree of {commit} here: {archive.stderr.decode().strip()}")
    base.mkdir()
    subprocess.run(["tar", "-x", "-C", str(base)], input=archive.stdout, check=True)
    return base


def copy_of(tree: Path, base: Path) -> Path:
    """The same folders of this tree: a release is all files around a script, and takes longer the more there are."""
    for name in FOLDERS:
        shutil.copytree(tree / name, base / name, ignore=shutil.ignore_patterns("__pycache__"))
    return base


def main(words: list[str]) -> None:
    commit, *parts = words or [""]
    if not commit or {*parts} - {*PARTS}:
        sys.exit(f'bench-older: say ARGS="COMMIT PART ...", with parts from {", ".join(PARTS)}; none of them means all')
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        base = Path(name).resolve()
        given, older = Path(commit).resolve(), base / "older"
        older = copy_of(given, older) if given.is_dir() else tree_of(commit, older)
        before, now = compare(older, copy_of(ROOT, base / "newer"), parts or [*PARTS])
    table, findings = judge(before, now, Path(commit).name)
    findings.skipped |= {part: "not asked for" for part in PARTS if parts and part not in parts}
    runs = {
        f"{when}, {name}": took for when, all_of in (("then", before), ("now", now)) for name, took in all_of.items()
    }
    report("older", table, findings, {name: list[float | None](took) for name, took in runs.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
