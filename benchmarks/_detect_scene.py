"""The injector's side of a running job: gives orders to its ranks, and reads from the journal who was named for it."""

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks._detect_rank import FOR_EVER_S, PAGE
from benchmarks._harness import Job, holdfast
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.wire.controller_request import ControllerNotRunning

SCRIPT = Path(__file__).with_name("_detect_rank.py")
RANKS = 4
# The kills that undo a hang are no news of nodes, however many they are; nothing here touches a detector.
FLAGS = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=100000", "--set=recovery.window_s=0.001"]
START_S = 120.0
STEADY_STEPS = 15
T = TypeVar("T")


class Failed(Exception):
    """One sentence: what did not happen."""


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm as it stands in the journal."""

    at: float
    kind: str
    stance: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    reason: str


class Page(msgspec.Struct, frozen=True):
    """What a rank last told of its steps."""

    generation: int = 0
    pid: int = 0
    steps: int = 0
    first_at: float = 0.0
    at: float = 0.0


class Scene:
    def __init__(self, job: Job, script: Path = SCRIPT) -> None:
        self.job = job
        self._script = script
        self.folder = job.folder / "work"
        self.run_dir = job.folder / "run"
        self.folder.mkdir()
        self._ids = itertools.count(1)
        self._seq = 0

    def start(self, *flags: str, env: Mapping[str, str] | None = None, timeout_s: float = 0.0) -> None:
        """Start the script; a collective of it ends with an error after so long, or after what torch says."""
        temporary = self.job.folder / "tmp"  # killed ranks cannot remove what multiprocessing makes there
        temporary.mkdir()
        command = [*holdfast(self.run_dir, *FLAGS, *flags), str(self._script), str(self.folder), f"{timeout_s:g}"]
        self.job.spawn(command, {"TMPDIR": str(temporary), **(env or {})})
        self.steady(START_S)

    # --- looking -----------------------------------------------------------------------------------------------

    def page(self, rank: int) -> Page:
        with suppress(FileNotFoundError):
            image = (self.folder / f"page-{rank}").read_bytes()[: PAGE.size]
            if len(image) == PAGE.size:
                return Page(*PAGE.unpack(image))
        return Page()

    def pages(self) -> list[Page]:
        return [self.page(rank) for rank in range(RANKS)]

    def generation(self) -> int:
        return max(page.generation for page in self.pages())

    def step(self) -> int:
        return max(page.steps for page in self.pages())

    def steady(self, limit_s: float = 60.0, after: int = 0) -> None:
        """Until all ranks of one generation, later than this one, have made some steps."""

        def look() -> bool:
            pages = self.pages()
            generations = {page.generation for page in pages}
            return len(generations) == 1 and max(generations) > after and min(p.steps for p in pages) >= STEADY_STEPS

        self.until(look, f"steps after generation {after}", limit_s)

    def stepped(self, after: int, limit_s: float = 60.0) -> float:
        """When all ranks of a generation later than this one had made a step."""
        self.until(lambda: min(p.generation for p in self.pages()) > after, f"a step after generation {after}", limit_s)
        return max(page.first_at for page in self.pages())

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = ask_controller(self.run_dir, "/api/v1/status")
        except (ControllerNotRunning, OSError):
            return {}
        return found

    def node_of(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for view in self.status()["nodes"]:
            if view["role"] == "active":
                first, _, last = view["ranks"].partition("-")
                found |= dict.fromkeys(range(int(first), int(last or first) + 1), view["node"])
        return found

    def has_standby(self) -> bool:
        return any(view["role"] == "ready" for view in self.status().get("nodes", ()))

    def alarms(self, kinds: Collection[Kind] = (Kind.HANG, Kind.SLOW)) -> list[Named]:
        """Those that the journal has got since they were last asked for."""
        journal = SqliteJournal(self.run_dir / "journal.db", read_only=True)
        found = []
        try:
            for entry in journal.read(self._seq):
                self._seq = entry.seq
                if isinstance(alarm := entry.event, Alarm) and alarm.kind in kinds:
                    found.append(
                        Named(
                            at=entry.at,
                            kind=alarm.kind.value,
                            stance=alarm.stance.value,
                            ranks=alarm.ranks,
                            nodes=alarm.suspects,
                            reason=alarm.reason,
                        )
                    )
        finally:
            journal.close()
        return found

    def until(self, look: Callable[[], T], what: str, limit_s: float = 60.0) -> T:
        end = time.monotonic() + limit_s
        while not (found := look()):
            if time.monotonic() > end or self.job.launchers[0].poll() is not None:
                raise Failed(f"waited up to {limit_s:g} s in vain: {what}\n{self.job.last_words()}")
            time.sleep(0.05)
        return found

    # --- ordering ----------------------------------------------------------------------------------------------

    @contextmanager
    def order(self, kind: str, *ranks: int, **more: float | str) -> Iterator[int]:
        """An order to these ranks, or to all, as long as the block lasts; its number."""
        id = next(self._ids)
        order = {"id": id, "kind": kind, "ranks": ranks, "at": 0, "seconds": FOR_EVER_S, "times": 1.0, **more}
        part = self.folder / "order.part"
        part.write_text(json.dumps(order))
        part.replace(self.folder / "order")
        try:
            yield id
        finally:
            (self.folder / "order").unlink()

    def noted(self, what: str, id: int, rank: int) -> float:
        """When a rank began, or ended, what it was ordered; 0: not yet."""
        with suppress(FileNotFoundError):
            return float((self.folder / f"{what}-{id}-{rank}").read_text())
        return 0.0

    def began(self, id: int, rank: int) -> float:
        return self.until(lambda: self.noted("began", id, rank), f"rank {rank} begins", 20.0)

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send it to a rank; when."""
        pid = self.page(rank).pid
        if not self.job.owns(pid):
            raise Failed(f"rank {rank} (pid {pid}) is gone")
        at = time.time()
        os.kill(pid, number)
        return at


def at_random(chance: random.Random, most_s: float) -> None:
    time.sleep(chance.uniform(0.0, most_s))
