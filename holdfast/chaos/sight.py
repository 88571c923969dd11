"""A running job seen from outside: who runs where, at which step, and what its journal says."""

import contextlib
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.chaos import hold, spaces
from holdfast.chaos.fault import Cannot
from holdfast.core.decoding import decoder, from_json
from holdfast.core.roles import Role
from holdfast.journal.sqlite import JournalError, SqliteJournal
from holdfast.model.event import Entry
from holdfast.wire import slot, spec
from holdfast.wire.controller_call import NotRunning, Refused, fetch
from holdfast.wire.keeping import Want
from holdfast.wire.spec import Listening, NodeSpec, RunSpec

_WAIT_S = 5.0
_COMMAND_S = 120.0
_SEATED = (Role.ACTIVE, Role.ADMITTING, Role.DRAINING)
_HOLDER, _AGENT, _STORE = "holdfast.agent.holder", "holdfast.agent.main", "holdfast.client.store"
_CONTROLLER = "holdfast.cli.controller"
_entries = decoder(msgspec.json.Decoder(list[Entry]))


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """As the controller shows it."""

    node: str
    role: str
    ranks: str = ""

    @property
    def numbers(self) -> range:
        first, _, last = self.ranks.partition("-")
        return range(int(first), int(last or first) + 1) if first else range(0)


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """As much of it as is needed here."""

    phase: str
    generation: int
    step: int
    floor: int
    nodes: tuple[Node, ...]

    @property
    def active(self) -> list[Node]:
        """Those that have ranks."""
        return [node for node in self.nodes if node.role in _SEATED and node.ranks]

    @property
    def standbys(self) -> list[Node]:
        return [node for node in self.nodes if node.role == Role.READY]

    def node_of(self, rank: int) -> str:
        for node in self.active:
            if rank in node.numbers:
                return node.node
        raise Cannot(f"there is no rank {rank} in this job")

    @property
    def world(self) -> int:
        return sum(len(node.numbers) for node in self.active)


class Sight:
    """In a lab every host has a run directory of its own below `hosts`, and the controller answers in a `space`."""

    def __init__(self, run_dir: Path, hosts: Path | None = None, space: int | None = None) -> None:
        self.run_dir = run_dir
        self.run = spec.read(run_dir / "run.json", RunSpec)
        self._hosts, self._space = hosts, space
        self._seq = 0
        self._arenas: dict[int, mmap.mmap] = {}

    # --- the controller ----------------------------------------------------------------------------------------

    def ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """What the controller answers; empty if there is none at the moment."""
        try:
            return fetch(self.run_dir, path, body)
        except Refused as e:
            raise Cannot(f"the controller refused: {e.why}") from None
        except NotRunning:
            return b""

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One of our commands, run where the controller can be reached."""
        space = self._space
        return subprocess.run(
            [sys.executable, "-m", "holdfast.cli", *words],
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
            preexec_fn=None if space is None else lambda: spaces.enter(space, spaces.NEWNET),
        )

    def status(self) -> Status | None:
        answer = self.ask("/api/v1/status")
        return from_json(answer, Status) if answer else None

    def news(self) -> list[Entry]:
        """Entries of the journal that were not seen before, from the controller or, when it is gone, from its file."""
        answer = self.ask(f"/api/v1/entries?after={self._seq}")
        found = _entries(answer) if answer else self._filed()
        if found:
            self._seq = found[-1].seq
        return found

    def _filed(self) -> list[Entry]:
        try:
            journal = SqliteJournal(self.run_dir / "journal.db", read_only=True)
        except JournalError:
            return []
        try:
            return list(journal.read(self._seq))
        except JournalError:
            return []
        finally:
            journal.close()

    def ended(self) -> bool:
        return (self.run_dir / "exit.json").exists()

    def controller(self) -> int:
        try:
            found = spec.read(self.run_dir / "controller.json", Listening).pid
        except (OSError, msgspec.DecodeError):
            found = 0
        if not found or not self._serves(found, _CONTROLLER, self.run_dir):
            raise Cannot("the job has no controller now")
        return found

    def store(self) -> int:
        """The process with torch's store."""
        for name in filter(str.isdecimal, os.listdir("/proc")):
            if self._serves(int(name), _STORE, self.run_dir):
                return int(name)
        raise Cannot("the job has no store process")

    # --- nodes and ranks ---------------------------------------------------------------------------------------

    def folder(self, node: str) -> Path:
        folders: list[Path] = [self.run_dir, *(self._hosts.iterdir() if self._hosts else ())]
        for folder in folders:
            if (folder / "nodes" / node / "spec.json").exists():
                return folder / "nodes" / node
        raise Cannot(f"{node} has no folder on this host")

    def holder(self, node: str) -> int:
        """By its pid, and by its command line, for the pid may be somebody else's by now."""
        folder = self.folder(node)
        try:
            pid = int((folder / "holder.pid").read_text())
        except (OSError, ValueError):
            pid = 0
        if not pid or not self._serves(pid, _HOLDER, folder):
            raise Cannot(f"{node} has no holder on this host")
        return pid

    def _serves(self, pid: int, word: str, folder: Path) -> bool:
        """Whether the command line of a process has this word, and after it this folder."""
        argv = hold.command(pid)
        try:
            return os.path.samefile(self._outside(argv[argv.index(word) + 1]), folder)
        except (OSError, ValueError, IndexError):
            return False

    def agent(self, node: str) -> int:
        for pid in hold.children(self.holder(node)):
            if _AGENT in hold.command(pid) and hold.state(pid) != "Z":
                return pid
        raise Cannot(f"{node} has no agent at the moment")

    def node_spec(self, node: str) -> NodeSpec:
        return spec.read(self.folder(node) / "spec.json", NodeSpec)

    def reading(self, node: str, local: int) -> slot.Reading | None:
        """What a rank last told, without anybody's help: it works on ranks that are stopped."""
        try:
            arena = self._arena(self.holder(node))
        except (Cannot, OSError):
            return None
        return slot.read(arena, local)

    def read(self, status: Status, rank: int) -> slot.Reading | None:
        for node in status.active:
            if rank in node.numbers:
                found = self.reading(node.node, rank - node.numbers.start)
                return found if found and found.rank == rank else None
        return None

    def pid(self, status: Status, rank: int) -> int:
        """Of a rank of this generation."""
        node = status.node_of(rank)
        log_dir = self.node_spec(node).log_dir  # every host has its own
        where = self._outside(log_dir) / f"gen-{status.generation}/rank-{rank}/pid"
        try:
            return self.below(node, int(where.read_text()))
        except (OSError, ValueError):
            raise Cannot(f"rank {rank} has no process at the moment") from None

    def below(self, node: str, pid: int) -> int:
        """The same pid, if it is still one of the node's processes: all of them descend from its holder."""
        if not hold.is_below(pid, self.holder(node)):
            raise Cannot(f"process {pid} is none of {node} any more")
        return pid

    def wants(self, node: str) -> list[Want]:
        """What the ranks of a node asked their keeper for."""
        found = []
        for path in sorted(self.folder(node).glob("want-*.json")):
            try:
                found.append(spec.read(path, Want))
            except (OSError, msgspec.DecodeError):
                continue
        return found

    def checkpoints(self, status: Status) -> Path:
        """The folder that checkpoints are written to."""
        for node in status.active:
            for want in self.wants(node.node):
                if want.storage and urlsplit(want.storage.url).scheme in ("", "file", "faulty"):
                    return self._outside(urlsplit(want.storage.url).path)
        raise Cannot("the job writes no checkpoints to a folder of this host")

    def owned(self, path: str, status: Status) -> Path:
        """A file of the job's, as we see it: in its run directory, or among its checkpoints."""
        places = [self._hosts or self.run_dir]
        with contextlib.suppress(Cannot):  # it writes none
            places.append(self.checkpoints(status))
        found = self._outside(os.path.abspath(path))
        if not any(found.resolve().is_relative_to(place.resolve()) for place in places):
            raise Cannot(f"{path} is no file of this job: give one in {' or '.join(map(str, places))}")
        return found

    def _outside(self, path: str) -> Path:
        """A path of the job's as we see it, should it have mounts of its own."""
        parts = self.run_dir.parts
        return Path(*parts[:4]) / path.lstrip("/") if parts[:2] == ("/", "proc") else Path(path)

    def _arena(self, holder: int) -> mmap.mmap:
        if holder not in self._arenas:
            for path in Path(f"/proc/{holder}/fd").iterdir():
                if os.readlink(path).startswith("/memfd:holdfast-slots"):
                    self._arenas[holder] = slot.open_arena(str(path))
                    break
            else:
                raise Cannot(f"holder {holder} keeps no slots")
        return self._arenas[holder]
