"""The torturer's side of a running job: sees what every rank is doing, strikes there, and judges how it comes back."""

import json
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.checkpoint.arena import Arena, ArenaError

SCRIPT = Path(__file__).with_name("_ckpt_torture.py")
PAGE_BYTES = 4096
PHASES = ("start", "restore", "train", "copy", "copied", "sealed")  # by the numbers that the script writes
PATIENCE_S = 60.0
# Nodes stay, however often their ranks are killed and however long a busy machine takes to start another agent: what
# their memory holds is what is to be judged.
KEEP_NODES = ["--max-restarts=100000", "--set=recovery.window_s=0.001", "--set=silence.silence_s=30"]
T = TypeVar("T")


class Look(msgspec.Struct, frozen=True):
    """What a rank did when it was looked at."""

    phase: str
    pid: int
    generation: int
    step: int


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that were killed: what they were at, and the newest step that all ranks had sealed by then."""

    looks: dict[int, Look]
    sealed: int
    reached: int  # the newest step that all ranks had made
    generation: int
    held: dict[int, list[int]] = {}  # the steps of which each rank had a whole snapshot


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """How all ranks came back: the same for each, or it says so."""

    step: int
    sources: tuple[str, ...]
    took_s: float


class Failed(Exception):
    """One sentence: what did not happen, or should not have."""


class Scene:
    def __init__(self, folder: Path, run_dir: Path, ranks: int, lives: Callable[[], bool] = lambda: True) -> None:
        self._lives = lives
        self.folder = folder
        self.run_dir = run_dir
        self.ranks = range(ranks)
        self._pages: dict[int, memoryview] = {}
        self._lines: dict[int, list[dict[str, object]]] = {rank: [] for rank in self.ranks}
        self._read_bytes: dict[int, int] = {}

    # --- looking -----------------------------------------------------------------------------------------------

    def look(self, rank: int) -> Look:
        if rank not in self._pages:
            path = self.folder / f"page-{rank}"
            if not path.exists() or path.stat().st_size < PAGE_BYTES:
                return Look("start", 0, 0, 0)
            with path.open("rb") as file:
                self._pages[rank] = memoryview(mmap.mmap(file.fileno(), PAGE_BYTES, prot=mmap.PROT_READ)).cast("q")
        words = self._pages[rank]
        return Look(PHASES[words[0]], words[1], words[2], words[3])

    def holders(self) -> Iterator[tuple[Path, int]]:
        for path in sorted(self.run_dir.glob("nodes/*/holder.pid")):
            with _gone():
                yield path.parent, int(path.read_text())

    def holder_of(self, rank: int) -> tuple[Path, int]:
        """The node that keeps the memory of a rank, and its holder."""
        for node, pid in self.holders():
            if self._memory(pid, rank):
                return node, pid
        raise Failed(f"no node keeps memory for rank {rank}")

    def arena(self, rank: int) -> Arena:
        """The memory that holds the snapshots of a rank, whether it lives or not."""
        for _, pid in self.holders():
            if path := self._memory(pid, rank):
                return Arena.open(path)
        raise Failed(f"no node keeps memory for rank {rank}")

    def _memory(self, holder: int, rank: int) -> str:
        named = f"memfd:holdfast-rank-{rank} "
        found: list[Path] = []
        with _gone():
            found = list(Path(f"/proc/{holder}/fd").iterdir())
        return next((str(path) for path in found if _target(path).startswith(named)), "")

    def sealed(self) -> int:
        """The newest step of which every rank has a whole snapshot; 0: there is none."""
        return newest(self.held())

    def held(self) -> dict[int, list[int]]:
        """The steps of which each rank has a whole snapshot in its own node's memory."""
        try:
            return {rank: sorted(one.step for one in self.arena(rank).list_sealed()) for rank in self.ranks}
        except (Failed, ArenaError):
            return {rank: [] for rank in self.ranks}

    def reached(self) -> int:
        """The newest step that every rank has made and tried to save."""
        last = [self.lines(rank)[-1:] for rank in self.ranks]
        return min(int(str(line.get("step", line.get("from")))) for lines in last for line in lines or [{"step": 0}])

    def generation(self) -> int:
        return max(self.look(rank).generation for rank in self.ranks)

    def lines(self, rank: int) -> list[dict[str, object]]:
        """What a rank has left in its trace, in order."""
        path = self.folder / f"trace-{rank}.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(rank, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self._read_bytes[rank] = self._read_bytes.get(rank, 0) + len(whole) + len(end)
            self._lines[rank] += _decoded(whole)
        return self._lines[rank]

    def steps(self, rank: int, pid: int) -> int:
        """How many steps a rank with this pid has made."""
        for made, line in enumerate(reversed(self.lines(rank))):
            if "from" in line:
                return made if line["pid"] == pid else 0
        return 0

    # --- waiting -----------------------------------------------------------------------------------------------

    def until(self, look: Callable[[], T | None], what: str, limit_s: float = PATIENCE_S) -> T:
        end = time.monotonic() + limit_s
        while not (found := look()):
            if time.monotonic() > end or not self._lives():
                raise Failed(f"waited up to {limit_s:g} s in vain: {what}")
            time.sleep(0.01)
        return found

    def trains(self, generation: int, steps: int = 3) -> None:
        """Wait until every rank of this generation, or a later one, has made so many steps."""

        def done() -> bool:
            looks = [self.look(rank) for rank in self.ranks]
            there = all(look.generation >= generation for look in looks)
            return there and all(
                self.steps(rank, look.pid) >= steps for rank, look in zip(self.ranks, looks, strict=True)
            )

        self.until(done, f"steps in generation {generation}")

    def came(self, struck: Struck, since: float, limit_s: float = PATIENCE_S) -> Came:
        """Wait until all ranks have restored in a later generation, and say from what."""
        self.until(lambda: self.generation() > struck.generation, "another generation", limit_s)
        self.trains(struck.generation + 1, steps=1)
        found = [next(line for line in reversed(self.lines(rank)) if "from" in line) for rank in self.ranks]
        if len(steps := {int(str(line["from"])) for line in found}) != 1:
            raise Failed(f"ranks went on from different steps: {sorted(steps)}")
        sources = tuple(sorted({str(line["source"]) for line in found}))
        return Came(step=steps.pop(), sources=sources, took_s=time.monotonic() - since)

    # --- striking ----------------------------------------------------------------------------------------------

    def await_phase(self, rank: int, phase: str, limit_s: float = 10.0) -> bool:
        """Return in the moment in which a rank is in this phase; False if that does not happen."""
        end = time.monotonic() + limit_s
        turns = 0
        while self.look(rank).phase != phase:
            turns += 1
            if turns % 64 == 0 and time.monotonic() > end:
                return False
            time.sleep(0)
        return True

    def strike(self, *ranks: int) -> Struck:
        """SIGKILL, each rank right after it was stopped and looked at: so what it was at is known for certain."""
        looks: dict[int, Look] = {}
        held: list[tuple[int, int]] = []
        try:
            for rank in ranks:
                pid = self.look(rank).pid
                held.append((pid, os.pidfd_open(pid)))
                signal.pidfd_send_signal(held[-1][1], signal.SIGSTOP)
            for rank, (pid, _) in zip(ranks, held, strict=True):
                _await_stopped(pid)
                looks[rank] = self.look(rank)
            generation = max(look.generation for look in looks.values())
            steps, reached = self.held(), self.reached()
            struck = Struck(looks=looks, sealed=newest(steps), reached=reached, generation=generation, held=steps)
        finally:
            for _, fd in held:
                with _gone():
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                os.close(fd)
        return struck


def newest(held: dict[int, list[int]]) -> int:
    """The newest step that all ranks hold; 0: there is none."""
    return max(set.intersection(*map(set, held.values())), default=0)


def at_random(rng: random.Random, most_s: float) -> None:
    time.sleep(rng.uniform(0.0, most_s))


def _await_stopped(pid: int, limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while _state(pid) not in "TtZX":
        if time.monotonic() > end:
            raise Failed(f"process {pid} does not stop")


def _target(link: Path) -> str:
    try:
        return link.readlink().name
    except FileNotFoundError:
        return ""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


@contextmanager
def _gone() -> Iterator[None]:
    """Whatever is looked at may end meanwhile."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        pass


def _decoded(text: bytes) -> list[dict[str, object]]:
    """Lines of a trace; one that a kill has cut off is no line."""
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def differing(lines: Sequence[dict[str, object]], reference: Sequence[dict[str, object]]) -> list[int]:
    """Steps after which a rank's state was, at any time, another than in the undisturbed run."""
    wanted = {line["step"]: line["digest"] for line in reference if "step" in line}
    found = [(line.get("step", line.get("from")), line["digest"]) for line in lines if "digest" in line]
    if missing := {step for step, _ in found} - wanted.keys():
        raise Failed(f"the undisturbed run has no steps {sorted(map(str, missing))[:5]}")
    return sorted({int(str(step)) for step, seen in found if wanted[step] != seen})
