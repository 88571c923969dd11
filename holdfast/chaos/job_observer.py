"""Observes a running job from outside: which ranks run where, the current step, and the journal's entries."""

import contextlib
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.chaos import linux_namespaces, process_handles
from holdfast.chaos.injection_records import CannotInject
from holdfast.core.decide.node_roles import NodeRole
from holdfast.decoding import from_json, make_decoder
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.journal_entry import Entry
from holdfast.wire import run_and_node_specs
from holdfast.wire.controller_request import ControllerNotRunning, RequestRefused, fetch
from holdfast.wire.rank_keeper_messages import ArenaRequest
from holdfast.wire.rank_memory import slot_reader
from holdfast.wire.run_and_node_specs import ControllerAddress, NodeSpec, RunSpec

_WAIT_S = 5.0
_COMMAND_S = 120.0
_SEATED = (NodeRole.ACTIVE, NodeRole.ADMITTING, NodeRole.DRAINING)
_HOLDER, _AGENT, _STORE = (
    "holdfast.agent.process_holder",
    "holdfast.agent.main",
    "holdfast.client.boot.tcp_store_server",
)
_CONTROLLER = "holdfast.cli.launch.controller_main"
_entries = make_decoder(msgspec.json.Decoder(list[Entry]))


class ObservedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the controller's status shows it."""

    node: str
    role: str
    ranks: str = ""

    @property
    def rank_range(self) -> range:
        first, _, last = self.ranks.partition("-")
        return range(int(first), int(last or first) + 1) if first else range(0)


class ObservedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the controller's status that chaos needs."""

    phase: str
    generation: int
    step: int
    floor: int
    nodes: tuple[ObservedNode, ...]

    @property
    def active(self) -> list[ObservedNode]:
        """The nodes that have ranks."""
        return [node for node in self.nodes if node.role in _SEATED and node.ranks]

    @property
    def standbys(self) -> list[ObservedNode]:
        return [node for node in self.nodes if node.role == NodeRole.READY]

    def node_of(self, rank: int) -> str:
        for node in self.active:
            if rank in node.rank_range:
                return node.node
        raise CannotInject(f"there is no rank {rank} in this job")

    @property
    def world(self) -> int:
        return sum(len(node.rank_range) for node in self.active)


class JobObserver:
    """Observes one job. In a lab, `hosts` is the folder of all run directories, `space` the controller's network."""

    def __init__(self, run_dir: Path, hosts: Path | None = None, space: int | None = None) -> None:
        self.run_dir = run_dir
        self.run = run_and_node_specs.read_json(run_dir / "run.json", RunSpec)
        self._hosts, self._space = hosts, space
        self._seq = 0
        self._arenas: dict[int, mmap.mmap] = {}

    # --- the controller ----------------------------------------------------------------------------------------

    def ask_controller(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the controller's answer; empty if no controller runs. Raises CannotInject if it refuses."""
        try:
            return fetch(self.run_dir, path, body)
        except RequestRefused as e:
            raise CannotInject(f"the controller refused: {e.why}") from None
        except ControllerNotRunning:
            return b""

    def run_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a holdfast command in the network namespace from which the controller can be reached."""
        space = self._space
        return subprocess.run(
            [sys.executable, "-P", "-m", "holdfast.cli", *words],
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
            preexec_fn=None
            if space is None
            else lambda: linux_namespaces.enter_namespace(space, linux_namespaces.NEWNET),
        )

    def read_status(self) -> ObservedStatus | None:
        answer = self.ask_controller("/api/v1/status")
        return from_json(answer, ObservedStatus) if answer else None

    def new_entries(self) -> list[Entry]:
        """Return journal entries not returned before, from the controller or, if it is gone, from the journal file."""
        answer = self.ask_controller(f"/api/v1/entries?after={self._seq}")
        found = _entries(answer) if answer else self._entries_on_disk()
        if found:
            self._seq = found[-1].seq
        return found

    def _entries_on_disk(self) -> list[Entry]:
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

    def has_ended(self) -> bool:
        return (self.run_dir / "exit.json").exists()

    def controller_pid(self) -> int:
        try:
            found = run_and_node_specs.read_json(self.run_dir / "controller.json", ControllerAddress).pid
        except (OSError, msgspec.DecodeError):
            found = 0
        if not found or not self._has_command_line(found, _CONTROLLER, self.run_dir):
            raise CannotInject("the job has no controller now")
        return found

    def store_pid(self) -> int:
        """Return the pid of the process that runs torch's store."""
        for name in filter(str.isdecimal, os.listdir("/proc")):
            if self._has_command_line(int(name), _STORE, self.run_dir):
                return int(name)
        raise CannotInject("the job has no store process")

    # --- nodes and ranks ---------------------------------------------------------------------------------------

    def node_folder(self, node: str) -> Path:
        folders: list[Path] = [self.run_dir, *(self._hosts.iterdir() if self._hosts else ())]
        for folder in folders:
            if (folder / "nodes" / node / "spec.json").exists():
                return folder / "nodes" / node
        raise CannotInject(f"{node} has no folder on this host")

    def holder_pid(self, node: str) -> int:
        """Return the holder's pid, confirmed by its command line, because the pid may have been reused."""
        folder = self.node_folder(node)
        try:
            pid = int((folder / "holder.pid").read_text())
        except (OSError, ValueError):
            pid = 0
        if not pid or not self._has_command_line(pid, _HOLDER, folder):
            raise CannotInject(f"{node} has no holder on this host")
        return pid

    def _has_command_line(self, pid: int, word: str, folder: Path) -> bool:
        """Return whether a process's command line has this word followed by this folder."""
        argv = process_handles.command_line(pid)
        try:
            return os.path.samefile(self._outside_path(argv[argv.index(word) + 1]), folder)
        except (OSError, ValueError, IndexError):
            return False

    def agent_pid(self, node: str) -> int:
        for pid in process_handles.child_pids(self.holder_pid(node)):
            if _AGENT in process_handles.command_line(pid) and process_handles.process_state(pid) != "Z":
                return pid
        raise CannotInject(f"{node} has no agent at the moment")

    def node_spec(self, node: str) -> NodeSpec:
        return run_and_node_specs.read_json(self.node_folder(node) / "spec.json", NodeSpec)

    def read_local_slot(self, node: str, local: int) -> slot_reader.SlotReading | None:
        """Read a rank's progress slot straight from shared memory, which works even on stopped ranks."""
        try:
            arena = self._slot_memory(self.holder_pid(node))
        except (CannotInject, OSError):
            return None
        return slot_reader.read_slot(arena, local)

    def read_rank_slot(self, status: ObservedStatus, rank: int) -> slot_reader.SlotReading | None:
        for node in status.active:
            if rank in node.rank_range:
                found = self.read_local_slot(node.node, rank - node.rank_range.start)
                return found if found and found.rank == rank else None
        return None

    def rank_pid(self, status: ObservedStatus, rank: int) -> int:
        """Return the pid of a rank in the status's generation; raises CannotInject if it has no process."""
        node = status.node_of(rank)
        log_dir = self.node_spec(node).log_dir  # every host has its own
        where = self._outside_path(log_dir) / f"gen-{status.generation}/rank-{rank}/pid"
        try:
            return self.require_descendant(node, int(where.read_text()))
        except (OSError, ValueError):
            raise CannotInject(f"rank {rank} has no process at the moment") from None

    def require_descendant(self, node: str, pid: int) -> int:
        """Return the pid if the process still descends from the node's holder; raises CannotInject otherwise."""
        if not process_handles.is_descendant(pid, self.holder_pid(node)):
            raise CannotInject(f"process {pid} no longer belongs to {node}")
        return pid

    def arena_requests(self, node: str) -> list[ArenaRequest]:
        """Return the arena requests that the ranks of a node made to their keeper."""
        found = []
        for path in sorted(self.node_folder(node).glob("want-*.json")):
            try:
                found.append(run_and_node_specs.read_json(path, ArenaRequest))
            except (OSError, msgspec.DecodeError):
                continue
        return found

    def checkpoint_folder(self, status: ObservedStatus) -> Path:
        """Return the folder that checkpoints are written to; raises CannotInject if there is none on this host."""
        for node in status.active:
            for want in self.arena_requests(node.node):
                if want.storage and urlsplit(want.storage.url).scheme in ("", "file", "faulty"):
                    return self._outside_path(urlsplit(want.storage.url).path)
        raise CannotInject("the job writes no checkpoints to a folder of this host")

    def job_file(self, path: str, status: ObservedStatus) -> Path:
        """Return our path to a file of the job, which must be in the run directory or the checkpoint folder."""
        places = [self._hosts or self.run_dir]
        with contextlib.suppress(CannotInject):  # it writes none
            places.append(self.checkpoint_folder(status))
        found = self._outside_path(os.path.abspath(path))
        if not any(found.resolve().is_relative_to(place.resolve()) for place in places):
            raise CannotInject(f"{path} is not a file of this job; give one in {' or '.join(map(str, places))}")
        return found

    def _outside_path(self, path: str) -> Path:
        """Translate a path inside the job to one that we can open, in case the job has its own mounts."""
        parts = self.run_dir.parts
        return Path(*parts[:4]) / path.lstrip("/") if parts[:2] == ("/", "proc") else Path(path)

    def _slot_memory(self, holder: int) -> mmap.mmap:
        if holder not in self._arenas:
            for path in Path(f"/proc/{holder}/fd").iterdir():
                if os.readlink(path).startswith("/memfd:holdfast-slots"):
                    self._arenas[holder] = slot_reader.open_slot_memory(str(path))
                    break
            else:
                raise CannotInject(f"holder {holder} keeps no slots")
        return self._arenas[holder]
