"""Checks that must hold after any fault: equal states, every sample once, nothing left behind, a correct journal."""

import contextlib
import json
import os
import re
import time
from pathlib import Path

import msgspec

from holdfast.chaos import process_handles
from holdfast.core.decide.decider import Decider
from holdfast.core.record.ledger import Ledger
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal

MARK = "HOLDFAST_CHAOS_MARK"
_SETTLE_S = 15.0
State = tuple[str, tuple[int, ...]]  # digest after a step, and the samples it was made of


class RankTrace:
    """The trace file of one rank. Only the newest line of a step counts, because older lineages were abandoned."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.steps: dict[int, State] = {}
        self.restores: list[tuple[int, str]] = []

    def read(self) -> "RankTrace":
        if not self._path.exists():
            return self
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, end, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(end)
        for text in whole.splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # cut off by a kill
            if "step" in line:
                self.steps[line["step"]] = (line["digest"], tuple(line["samples"]))
            else:
                self.restores.append((line["from"], line["source"]))
        return self

    @property
    def last(self) -> int:
        return max(self.steps, default=0)


def open_traces(folder: Path, ranks: int) -> dict[int, RankTrace]:
    return {rank: RankTrace(folder / f"trace-{rank}.jsonl") for rank in range(ranks)}


def count_differing(found: dict[int, RankTrace], calm: dict[int, RankTrace], steps: range) -> tuple[int, int]:
    """Return how many states of these steps differ from the undisturbed run, and how many were compared."""
    pairs = [(found[rank].steps.get(step), calm[rank].steps.get(step)) for rank in found for step in steps]
    return sum(one != other for one, other in pairs), len(pairs)


def check_samples(found: dict[int, RankTrace], parts: int) -> list[str]:
    """Return the errors found: a rank without some step, and samples drawn twice by the first `parts` ranks."""
    last = min(trace.last for trace in found.values())
    wrong = []
    for rank, trace in found.items():
        if missing := [step for step in range(1, last + 1) if step not in trace.steps]:
            wrong.append(f"rank {rank} has no step {missing[0]}")
    drawing = [trace for rank, trace in found.items() if rank < parts]
    drawn = [one for trace in drawing for step, (_, these) in trace.steps.items() if step <= last for one in these]
    if len(set(drawn)) != len(drawn):
        wrong.append(f"{len(drawn) - len(set(drawn))} samples were seen twice")
    return wrong


def find_orphans(mark: str) -> list[str]:
    """Return processes that still carry the job's mark, after a short wait for those that are just ending."""
    until = time.monotonic() + _SETTLE_S
    while (left := _marked_pids(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    return [f"process {pid} is left: {' '.join(process_handles.command_line(pid))[:100]}" for pid in left]


def _marked_pids(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environ.split(b"\0") and process_handles.process_state(int(name)) not in ("Z", "X", ""):
            found.append(int(name))
    return found


class SharedMemoryWatch:
    """Watches what a job leaves in /dev/shm.

    A file is the job's if one of its processes had it open, if its name contains a pid of the job, or if its name
    starts with `holdfast`; any other file belongs to another job.
    """

    def __init__(self, mark: str, place: Path = Path("/dev/shm")) -> None:
        self._mark, self._place = mark, place
        self._before = self._list_names()
        self._pids: set[str] = set()
        self._used: set[str] = set()

    def note_users(self) -> None:
        """Record the job's current processes and what they have open in /dev/shm; call it while the job runs."""
        for pid in _marked_pids(self._mark):
            self._pids.add(str(pid))
            self._used |= self._opened_names(pid)

    def list_leftovers(self) -> list[str]:
        return [
            f"{name} is left in {self._place}"
            for name in sorted(self._list_names() - self._before)
            if self._is_ours(name)
        ]

    def _is_ours(self, name: str) -> bool:
        named = bool(self._pids & set(re.findall(r"[0-9]+", name)))
        return named or name in self._used or name.startswith("holdfast")

    def _list_names(self) -> set[str]:
        """Return the names of our user's files in /dev/shm."""
        with os.scandir(self._place) as found:
            return {one.name for one in found if _owner_uid(one) == os.geteuid()}

    def _opened_names(self, pid: int) -> set[str]:
        """Return the names that a process has open as files or mapped as memory."""
        paths = []
        with contextlib.suppress(OSError):  # it has just ended
            paths += [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            paths += [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        start = f"{self._place}/"
        return {path.removeprefix(start).partition("/")[0] for path in paths if path.startswith(start)}


def _owner_uid(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_uid
    except FileNotFoundError:
        return -1


def check_record(run_dir: Path) -> list[str]:
    """Rebuild a decider from the journal; return errors: decisions that differ, or spans with a gap or an overlap."""
    decider, ledger = Decider(), Ledger()
    try:
        journal = SqliteJournal(run_dir / "journal.db", read_only=True)
    except JournalError as e:
        return [str(e)]
    try:
        for entry in journal.read():
            if decider.step(entry.at, entry.event) != entry.decision:
                return [f"entry {entry.seq} of the journal leads to another decision in a replay"]
            ledger.add(entry)
    finally:
        journal.close()
    account = ledger.make_account()
    wrong = []
    for one, other in zip(account.spans, account.spans[1:], strict=False):
        if abs(one.end_at - other.start_at) > 1e-6:
            wrong.append(f"spans do not meet at {one.end_at}")
    if abs(sum(span.seconds for span in account.spans) - account.wall_s) > 1e-3:
        wrong.append("spans do not add up to the wall clock")
    return wrong


class JobChecks(msgspec.Struct, frozen=True, kw_only=True):
    """Checks of a whole job after its end; each field is empty or says what is wrong."""

    exit: str
    samples: tuple[str, ...]
    orphans: tuple[str, ...]
    shm: tuple[str, ...]
    record: tuple[str, ...]

    def all_wrong(self) -> list[str]:
        return [*filter(None, [self.exit]), *self.samples, *self.orphans, *self.shm, *self.record]
