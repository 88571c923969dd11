"""A job of the exact script under holdfast: started, looked at and struck from outside."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks._harness import STANDBY_LIMIT_S, START_LIMIT_S, Job, holdfast, holdfast_command
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.core.decide.node_roles import NodeRole
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.detector_alarm import Alarm, Kind
from holdfast.model.incident_record import Record
from holdfast.wire.controller_request import ControllerNotRunning

SCRIPT = Path(__file__).with_name("_exact_rank.py")
RANKS = 4
SHAPE = ("--nnodes=2", "--nproc-per-node=2")
LOOK_S = 60.0


class Failed(Exception):
    """One sentence: what did not happen."""


class Scene:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.run_dir = Path()
        self.out = job.folder / "digest"

    def start(self, flags: Sequence[str], *, steps: int = 1_000_000, period_s: float = 0.1, release: int = 1) -> None:
        """Start the script in a tree of its own; a second time, it goes on from the checkpoints of the first."""
        self.run_dir = self.job.folder / f"run-{len(self.job.launchers)}"
        script = self.tree(release) / SCRIPT.name
        kept = [
            f"--events={self.job.folder / 'events'}",
            f"--ckpt={self.job.folder / 'checkpoints'}",
            f"--out={self.out}",
        ]
        asked = [f"--steps={steps}", f"--period={period_s:g}"]
        self.job.spawn([*holdfast(self.run_dir, *SHAPE, *flags), str(script), *kept, *asked])

    def command(self, *args: str, limit_s: float = START_LIMIT_S) -> str:
        """What a command of ours prints."""
        asked = [*holdfast_command(), *args]
        ended = subprocess.run(asked, capture_output=True, text=True, timeout=limit_s, check=False)
        if ended.returncode:
            raise Failed(f"`holdfast {' '.join(args)}` ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
        return ended.stdout

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = ask_controller(self.run_dir, "/api/v1/status")
        except ControllerNotRunning:
            return {}
        return found

    def standbys(self) -> int:
        return sum(node["role"] == NodeRole.READY for node in self.status().get("nodes", ()))

    def await_standbys(self, count: int) -> None:
        if self.job.wait(lambda: self.standbys() >= count or None, STANDBY_LIMIT_S) is None:
            raise Failed(f"there were never {count} standbys:\n{self.job.last_words()}")

    def await_steps(self, count: int) -> None:
        if self.job.wait_steps(count) is None:
            raise Failed(f"the job never made {count} steps:\n{self.job.last_words()}")

    def records(self) -> list[Record]:
        """Incidents that are over, by the journal."""
        return records_of(self.run_dir)

    def lost_at(self, since: float) -> float | None:
        """When a node was first known to be lost, by the journal: the ranks of others may have failed for it before."""
        with closing(SqliteJournal(self.run_dir / "journal.db", read_only=True)) as journal:
            for entry in journal.read():
                if entry.at > since and isinstance(entry.event, Alarm) and entry.event.kind is Kind.SILENCE:
                    return entry.at
        return None

    def alive(self, rank: int) -> int | None:
        """The process of a rank, if it runs the script and lives."""
        found = [event for event in self.job.events() if event.rank == rank]
        pid = max(found, key=lambda event: event.at).pid if found else 0
        return pid if pid and self.job.owns(pid) else None

    def awaited(self, rank: int) -> int:
        if (pid := self.job.wait(lambda: self.alive(rank), LOOK_S)) is None:
            raise Failed(f"rank {rank} has not run for {LOOK_S:g} s:\n{self.job.last_words()}")
        return pid

    def signal(self, rank: int, number: signal.Signals) -> None:
        self._strike(rank, lambda pid: os.kill(pid, number))

    def lose_node(self, rank: int) -> None:
        """Kill the holder of the node on which a rank runs, and the kernel all below it."""

        def strike(pid: int) -> None:
            above = {process.pid for process in psutil.Process(pid).parents()}
            holders = {int(path.read_text()) for path in self.run_dir.glob("nodes/*/holder.pid")}
            if not above & holders:
                raise ProcessLookupError(pid)
            self.job.kill(*(above & holders))

        self._strike(rank, strike)

    def _strike(self, rank: int, strike: Callable[[int], None]) -> None:
        """At whatever moment: where the rank is just ending, its successor is struck."""
        for _ in range(50):
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                return strike(self.awaited(rank))
        raise Failed(f"rank {rank} ends whenever it is to be struck:\n{self.job.last_words()}")

    def tree(self, release: int, *, broken: bool = False) -> Path:
        """A tree of files with a release of the script in it."""
        text = SCRIPT.read_text()
        for line, other in (("RELEASE = 1 ", f"RELEASE = {release} "), ("BROKEN = False ", f"BROKEN = {broken} ")):
            if line not in text:
                raise Failed(f"{SCRIPT.name} has no line {line!r}")
            text = text.replace(line, other)
        folder = self.job.folder / f"tree-{release}"
        folder.mkdir(exist_ok=True)
        (folder / SCRIPT.name).write_text(text)
        return folder


def records_of(run_dir: Path) -> list[Record]:
    try:
        with closing(SqliteJournal(run_dir / "journal.db", read_only=True)) as journal:
            return [entry.decision.closed for entry in journal.read() if entry.decision.closed]
    except JournalError:
        return []
