"""Fleet of local nodes: each is a process tree on this host, with a holder at its root."""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from holdfast.core.incident.own_process_end import describe_own_exit
from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.linux.regular_files import open_log
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from holdfast.model.observation import Departure
from holdfast.wire import folder_use_lock, program_fork_server, run_and_node_specs
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.program_fork_server import ProgramProcess
from holdfast.wire.run_and_node_specs import NodeSpec

_NAME = re.compile(r"n\d+")
_KILL_S = 15.0
MARK = "HOLDFAST_MARK"  # in the environment of everything a node starts, so that nothing of it can hide
# Beside it: other users of the host can tell the path of the folder, and their processes could pose as a node's.
_PROOF, _PROOF_FILE = "HOLDFAST_MARK_PROOF", "mark"


def start_node(node_dir: Path, node: NodeSpec, env: dict[str, str], server: Path | None = None) -> int:
    """Start a holder that outlives this process, through the fork server if there is one; return its pid."""
    try:
        node_dir.mkdir(parents=True, exist_ok=True)
        run_and_node_specs.write_json(node_dir / "spec.json", node)
        mutual_tls.write_new_secret(node_dir / _PROOF_FILE, secrets.token_hex(16).encode())
        log_path = str(node_dir / "holder.log")
        with folder_use_lock.shared_lock(node_dir) as held, open(open_log(log_path), "ab") as log:
            program = Program(
                module="holdfast.agent.process_holder",
                args=(str(node_dir),),
                env=env | _node_mark(node_dir),
                cwd=os.getcwd(),
            )
            files = OpenFiles(stdout=log.fileno(), stderr=log.fileno(), keep=held)  # its lock is never let go
            process = program_fork_server.start_program(program, files, server)
    except OSError:
        end_node(node_dir, grace_s=0.0)  # whether it was started is not known
        shutil.rmtree(node_dir, ignore_errors=True)  # or it would count as a node that is coming
        raise
    _holders[process.pid] = process
    return process.pid


_holders: dict[int, ProgramProcess] = {}  # those we started; polled so that none stays a zombie
_exits: dict[int, int] = {}  # how those have ended that no fork server started
_reaping = threading.Lock()  # nodes are ended in threads: one must not close what another looks at


class LocalFleet:
    can_acquire = True
    survey_s = 1.0

    def __init__(self, run_dir: Path, template: NodeSpec, env: dict[str, str], server: Path | None = None) -> None:
        self.template = template
        self._server = server
        self._starting = threading.Lock()
        self._unstarted: set[str] = set()  # nodes that are about to be started: they have no process yet
        self._ends: dict[str, str] = {}  # how the holders of nodes that are gone have ended, in words
        self._dir = run_dir / "nodes"
        self._dir.mkdir(parents=True, exist_ok=True)
        self._env = env
        for folder in map(self._dir.joinpath, self.nodes()):
            if not (folder / "agent.log").exists():  # a controller before us died while it was being started
                end_node(folder)
                shutil.rmtree(folder, ignore_errors=True)

    def nodes(self) -> tuple[str, ...]:
        return tuple(
            f"n{order}" for order in self._used_numbers() if not (self._dir / f"n{order}" / "released").exists()
        )

    def departures(self) -> tuple[Departure, ...]:
        found = []
        for node in self.nodes():
            with contextlib.suppress(OSError, msgspec.DecodeError):  # most nodes have none; a torn one is none
                found.append(run_and_node_specs.read_json(self._dir / node / "departure.json", Departure))
        return tuple(found)

    def _used_numbers(self) -> list[int]:
        """Return the numbers of all nodes of this run, past ones included, because no name is used twice in a run."""
        return sorted(int(path.name[1:]) for path in self._dir.iterdir() if _NAME.fullmatch(path.name))

    async def acquire(self, count: int, evicted: Collection[str] = ()) -> tuple[str, ...]:
        """Start nodes and return their names. All folders are made first, so that a call to end all nodes sees them."""
        first = max(self._used_numbers(), default=-1) + 1
        nodes = [msgspec.structs.replace(self.template, node=f"n{n}", order=n) for n in range(first, first + count)]
        names = tuple(node.node for node in nodes)
        self._unstarted.update(names)
        try:
            for name in names:
                (self._dir / name).mkdir()
            await asyncio.to_thread(self._start_nodes, nodes)
        finally:
            self._unstarted.difference_update(names)
        return names

    def _start_nodes(self, nodes: list[NodeSpec]) -> None:
        """Start nodes one by one. Runs in a thread, because a new fork server takes seconds to answer."""
        while nodes:
            folder = self._dir / nodes[0].node
            with self._starting:
                if not (folder / "released").exists():
                    self._start_first(nodes)
            self._unstarted.discard(folder.name)
            nodes = nodes[1:]

    def _start_first(self, nodes: list[NodeSpec]) -> None:
        try:
            start_node(self._dir / nodes[0].node, nodes[0], self._env, self._server)
        except OSError:
            for node in nodes:
                shutil.rmtree(self._dir / node.node, ignore_errors=True)  # or they would count as nodes that are coming
            raise

    async def give_back(self, node: str, reason: str, cause: Dismissal = Dismissal.UNTOLD) -> None:
        folder = self._dir / node
        if not folder.is_dir():
            return
        (folder / "released").write_text(f"{reason}\n")
        await asyncio.to_thread(self._end_in_thread, folder)

    async def survey(self) -> dict[str, FleetNode]:
        return await asyncio.to_thread(self._survey_nodes)

    def _survey_nodes(self) -> dict[str, FleetNode]:
        starting = FleetNode(state=FleetState.STARTING)
        nodes = self.nodes()  # before the question who is unstarted: those that come between are none of these
        return {node: starting if node in self._unstarted else self._survey_started(node) for node in nodes}

    def _survey_started(self, node: str) -> FleetNode:
        seen = survey_node(self._dir / node)
        if seen.state is not FleetState.GONE:
            return seen
        if node not in self._ends:  # how its holder ended is asked once
            self._ends[node] = _describe_end(_read_pid(self._dir / node / "holder.pid"), self._server)
        return msgspec.structs.replace(seen, reason=self._ends[node] or seen.reason)

    def _end_in_thread(self, folder: Path) -> None:
        with self._starting:  # from here on it is there or will never be
            pass
        end_node(folder)


def end_node(folder: Path, grace_s: float = 5.0) -> None:
    """End a node's holder, then kill all other processes of the node. Raise OSError if some survive."""
    mark = _node_mark(folder)
    pid = _read_pid(folder / "holder.pid")
    if pid and _signal_marked(pid, signal.SIGTERM, mark):
        until = time.monotonic() + grace_s
        while _has_mark(pid, mark) and time.monotonic() < until:
            _reap_children()
            time.sleep(0.01)
    _reap_children()
    until, none_found = time.monotonic() + _KILL_S, 0
    while none_found < 2:  # amid an exec a process shows no environment, and so no mark: look again
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        left = [pid for pid in pids if _signal_marked(pid, signal.SIGKILL, mark)]
        if left and time.monotonic() > until:
            raise OSError(f"processes of {folder.name} outlive SIGKILL: pid {', '.join(map(str, left))}")
        none_found = 0 if left else none_found + 1
        _reap_children()
        time.sleep(0.01)
    (folder / "holder.pid").unlink(missing_ok=True)


def survey_node(folder: Path) -> FleetNode:
    """Return a local node's state. The node is up if its holder runs. Otherwise it is gone if none of its processes is
    left, starting if it was never up, and unknown in all other cases."""
    was_up = (folder / "agent.log").exists()  # asked first: a holder notes its pid before it starts an agent
    pid = _read_pid(folder / "holder.pid")
    if pid and _has_mark(pid, _node_mark(folder)):
        return FleetNode(state=FleetState.UP)
    left = node_processes(folder)
    if not left:
        time.sleep(0.01)  # amid an exec a process shows no environment, and so no mark: look again
        left = node_processes(folder)
    if not left:
        return FleetNode(state=FleetState.GONE, reason="none of its processes is alive")
    if not pid and not was_up:
        return FleetNode(state=FleetState.STARTING)
    pids = ", ".join(map(str, left))
    return FleetNode(state=FleetState.UNKNOWN, reason=f"its holder has ended, and pid {pids} has not")


def node_processes(folder: Path) -> list[int]:
    """Return the pids of all processes of a node. An environment variable marks them, even if its holder is gone."""
    mark = _node_mark(folder)
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_mark(pid, mark)]


def _reap_children() -> None:
    with _reaping:
        for pid, process in list(_holders.items()):
            if process.is_over():
                _exits.update({pid: code} if (code := process.exit_code()) is not None else {})
                del _holders[pid]
                process.close()


def _describe_end(holder: int, server: Path | None) -> str:
    """Return how a node's holder has ended, in words; "" if nobody knows. All its processes end with it."""
    _reap_children()
    code = _exits[holder] if holder in _exits else program_fork_server.find_exit_code(server, holder)
    return f"its holder {describe_own_exit(code)}, and with it all its processes" if code is not None else ""


def _read_pid(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _node_mark(node_dir: Path) -> dict[str, str]:
    """Return the variables that mark a node's processes. A node that an older holdfast has started has no proof."""
    found = {MARK: os.path.realpath(node_dir)}  # two runs may have the same id, but not the same folder
    with contextlib.suppress(OSError):
        found[_PROOF] = (node_dir / _PROOF_FILE).read_text()
    return found


def _has_mark(pid: int, mark: dict[str, str]) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return {f"{name}={value}".encode() for name, value in mark.items()} <= {*environ.split(b"\0")}


def _signal_marked(pid: int, number: int, mark: dict[str, str]) -> bool:
    """Send the signal to a process whose environment carries the mark. Return whether the signal was sent. A process
    that has only got the same pid later is never hit."""
    if not _has_mark(pid, mark):
        return False
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _has_mark(pid, mark):  # looked at again: the fd now pins the process
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True
