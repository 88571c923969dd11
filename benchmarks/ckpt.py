"""What state that survives costs: saves, checkpoints and restores of half a gigabyte, beside copies and others' ways.

Model and AdamW state on the CPU, by one rank and by two. Sides take turns; only ratios within a round count.
`make bench-ckpt ARGS=stalls` does that part alone.
"""

import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

from rich.table import Table

from benchmarks import _ckpt_io, _ckpt_peer, _ckpt_restore, _ckpt_small, _ckpt_stall
from benchmarks._ckpt_restore import Restored
from benchmarks._ckpt_stall import COPY, OURS, SAVES, Stalls
from benchmarks._ckpt_ways import WAYS
from benchmarks._report import Findings, report

STALL_GOALS = {1: 0.8, 2: 1.0}  # by ranks
FIRST_GOAL, MEMORY_GOAL, COPIES_GOAL, SMALL_GOAL = 1.5, 2.05, 2.0, 1.0
PARTS = ("stalls", "storage", "restores", "peer", "small")
GROWTH_BYTES = 1 << 20  # over all those saves: less than one such leak of a page each would be more

Runs = dict[str, list[float | None]]


class Bench:
    """Everything that is found, as a table, figures and single measurements."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.findings = Findings()
        self.table = Table("what", "median of pairs", "all pairs", "goal", title="0.52 GB of state")
        self.runs: Runs = {}

    def stalls(self) -> None:
        for ranks in STALL_GOALS:
            self._stalls_of(ranks)

    def _stalls_of(self, ranks: int) -> None:
        """Of a steady save and of the first, alone and then beside each of the others."""
        suffix = "" if ranks == 1 else f"_{ranks}_ranks"
        alone = self._measured("", ranks)
        if alone.why:
            raise RuntimeError(f"holdfast could not save: {alone.why}")
        self._at_most(f"stall_over_memcpy{suffix}", _pairs(alone, OURS, COPY), STALL_GOALS[ranks])
        firsts = [alone.first[OURS] / statistics.median(alone.took[OURS])]
        for way in WAYS:
            found = self._measured(way, ranks)
            name = f"{_named(way)}{suffix}"
            if found.why:
                self.findings.skipped[name] = found.why
                continue
            firsts.append(found.first[OURS] / statistics.median(found.took[OURS]))
            self._note(f"{name}_stall_over_memcpy", _pairs(found, way, COPY))
            self._note(f"{name}_stall_over_holdfast", _pairs(found, way, OURS))
            self._note(f"{name}_first_over_steady", [found.first[way] / statistics.median(found.took[way])])
        self._at_most(f"first_over_steady{suffix}", firsts, FIRST_GOAL)
        if memory := alone.memory:
            self._at_most(f"arenas_over_state{suffix}", [memory.arenas / (alone.bytes / ranks)], MEMORY_GOAL)
            growth = memory.anonymous + memory.shared
            self.findings.figures[f"growth_over_{SAVES}_saves_bytes{suffix}"] = growth
            self.findings.goals[f"nothing_grows{suffix}"] = growth <= GROWTH_BYTES

    def restores(self) -> None:
        found = _ckpt_restore.measure(self.folder)
        self._at_most("restore_over_memcpy", [one.restore_s / one.copy_s for one in found], COPIES_GOAL)
        self._note("restore_over_copy_into_fresh_memory", [one.restore_s / one.fresh_s for one in found])
        self.findings.goals["restored_from_memory_none_lost"] = all(map(_is_whole, found)) and bool(found)
        self.runs["restore"] = [one.restore_s for one in found]
        self.runs["restore: memcpy"] = [one.copy_s for one in found]
        self.runs["restore: copy into fresh memory"] = [one.fresh_s for one in found]

    def storage(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as base:
            sides = _ckpt_io.measure(Path(base))
        _ckpt_io.judge(sides, self.table, self.findings)
        self.runs |= {side: list[float | None](took) for side, took in sides.items()}

    def peer(self) -> None:
        sides = _ckpt_peer.measure()
        _ckpt_peer.judge_peer(sides, self.table, self.findings)
        self.runs |= {f"peer: {side}": list[float | None](took) for side, took in sides.items()}

    def small(self) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as base:
            sides = _ckpt_small.measure(Path(base))
        pairs = _ckpt_io.ratio(sides, _ckpt_small.OURS, _ckpt_small.TORCH)[1]
        self._at_most("load_of_20000_small_tensors_over_torch", pairs, SMALL_GOAL)
        self.runs |= {side: list[float | None](took) for side, took in sides.items()}

    def _measured(self, way: str, ranks: int) -> Stalls:
        found = _ckpt_stall.measure(way, ranks, self.folder)
        label = f"{way or 'alone'}, {ranks} rank{'s' * (ranks > 1)}"
        self.runs |= {f"{label}: {name}": list[float | None](took) for name, took in found.took.items()}
        return found

    def _at_most(self, name: str, pairs: list[float], goal: float) -> None:
        self.findings.goals[name] = statistics.median(pairs) <= goal
        self._note(name, pairs, f"at most {goal:g}")

    def _note(self, name: str, pairs: list[float], goal: str = "") -> None:
        middle = statistics.median(pairs)
        self.findings.figures[name] = round(middle, 3)
        among = f"{min(pairs):.2f} to {max(pairs):.2f}" if len(pairs) > 1 else ""
        self.table.add_row(name.replace("_", " "), f"{middle:.2f}", among, goal)


def _pairs(stalls: Stalls, over: str, under: str) -> list[float]:
    return _ckpt_io.ratio(stalls.took, over, under)[1]


def _named(way: str) -> str:
    return way.replace(", ", "_").replace(".", "_").replace("-", "_")


def _is_whole(restored: Restored) -> bool:
    return restored.source == "memory" and not restored.lost


def main(asked: list[str]) -> int:
    if strange := sorted({*asked} - {*PARTS}):
        print(f"bench-ckpt: there is no part {', '.join(strange)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    began_at = time.monotonic()
    # Not /tmp, which is memory on many machines: direct I/O to it would measure nothing.
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=os.environ.get("BENCH_DIR", ".")) as folder:
        bench = Bench(Path(folder).resolve())
        parts = dict(zip(PARTS, (bench.stalls, bench.storage, bench.restores, bench.peer, bench.small), strict=True))
        for part in asked or PARTS:
            parts[part]()
    bench.findings.skipped |= {part: "not asked for" for part in PARTS if asked and part not in asked}
    bench.findings.skipped["H200"] = "there is no GPU here; see the figures of snapshots on one in docs/BENCHMARKS.md"
    bench.findings.figures["took_s"] = round(time.monotonic() - began_at)
    report("ckpt", bench.table, bench.findings, bench.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
