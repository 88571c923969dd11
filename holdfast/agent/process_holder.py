"""The holder, parent and subreaper of agent, zygote and ranks: it keeps what must outlive an agent, and decides
nothing."""

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.agent import main as agent
from holdfast.agent.agent_state_files import AgentStateFiles
from holdfast.agent.rank import last_words_judge
from holdfast.agent.system import child_process
from holdfast.agent.zygote_log import ZygoteLog
from holdfast.agent.zygotes import ZygotePorts, Zygotes
from holdfast.core.incident.own_process_end import describe_own_exit
from holdfast.linux import own_process_settings, preimported_fork
from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.linux.regular_files import open_log
from holdfast.logs import catalog_files
from holdfast.logs.secret_masking import keep_masked_log, make_secret_masker
from holdfast.wire import holder_messages, holder_zygote_messages, run_and_node_specs
from holdfast.wire.holder_messages import (
    ArenaMade,
    ExecRank,
    ForgetRank,
    HolderListing,
    HolderRank,
    KeptArena,
    KillRank,
    MakeArena,
    PreloadZygote,
    QuitHolder,
    RankEnded,
    RankStarted,
    RekeyRank,
    StartRefused,
    SweepDone,
    SweepLeftovers,
)
from holdfast.wire.rank_memory import flight_log_writer

_AGENT_TRIES = 10  # starts in a row that lived less than _AGENT_LIVED_S
_AGENT_LIVED_S = 5.0
_END_S = 10.0
_SWEEP_S = 5.0
_SWEEP_STEP_S = 0.01
_log = logging.getLogger("holdfast.holder")


class Holder:
    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self.spec = run_and_node_specs.read_json(node_dir / "spec.json", run_and_node_specs.NodeSpec)
        alone = os.memfd_create("holdfast-alone")
        memory = f"/proc/{os.getpid()}/fd"
        AgentStateFiles(node_dir).reset_notes(f"{memory}/{alone}")  # what is there is of an earlier life of this node
        self.ranks: dict[str, HolderRank] = {}
        self.code: int | None = None  # set: leave with this code
        arena = os.memfd_create("holdfast-slots")
        os.ftruncate(arena, flight_log_writer.slot_memory_bytes(self.spec.nproc))
        self.arena = f"{memory}/{arena}"
        self._unclaimed: dict[int, tuple[int, float]] = {}  # ended before the zygote had told us whose they were
        self._agent: tuple[int, socket.socket] | None = None
        self._lost_agent = ""  # how the one before ended
        self._agent_at = 0.0
        self._agent_tries = 0
        self._arenas: dict[str, KeptArena] = {}
        self._sweep_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._waker: socket.socket
        self._zygotes = Zygotes(
            node_dir,
            ZygotePorts(
                watch=self._watch_socket,
                watch_log=self._watch_log,
                drop=self._drop_socket,
                on_forked=self._on_forked,
                send_agent=self._send_agent,
                close_inherited=self._close_inherited,
            ),
        )

    def run(self) -> int:
        wake, self._waker = socket.socketpair()
        for end in (wake, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._request_exit(128 + signal.SIGTERM))
        signal.signal(signal.SIGINT, lambda *_: self._exit_with_grace())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(own_process_settings.END_WARNING, lambda *_: self._pass_warning())
        self._watch_socket(wake, self._on_wakeup)
        (self.node_dir / "holder.pid").write_text(f"{os.getpid()}\n")
        self._start_agent()
        while self.code is None:
            for key, _ in self._selector.select(None if self._sweep_until is None else _SWEEP_STEP_S):
                key.data(key.fileobj)
            if self._sweep_until is not None:
                self._sweep_orphans(self._sweep_until)
        self._kill_all()
        return self.code

    def _request_exit(self, code: int) -> None:
        self.code = code if self.code is None else self.code

    def _exit_with_grace(self) -> None:
        """Have the agent end its ranks and leave, as someone on this host has asked. Without an agent, exit at once."""
        if self._agent:
            os.kill(self._agent[0], signal.SIGINT)
        else:
            self._request_exit(128 + signal.SIGINT)

    def _pass_warning(self) -> None:
        if self._agent:
            os.kill(self._agent[0], own_process_settings.END_WARNING)

    def _on_wakeup(self, wake: socket.socket) -> None:
        wake.recv(4096)
        self._reap_children()

    # --- the agent ---------------------------------------------------------------------------------------------

    def _start_agent(self) -> None:
        """Start the first agent, or one that replaces a dead one. Exit after too many starts in quick succession."""
        while self._agent is None:
            self._agent_tries = 0 if time.monotonic() - self._agent_at > _AGENT_LIVED_S else self._agent_tries + 1
            if self._agent_tries >= _AGENT_TRIES:
                self._request_exit(1)
                return
            time.sleep(0.1 * self._agent_tries)
            self._agent_at = time.monotonic()
            try:
                self._agent = self._fork_agent()
            except OSError as e:
                _log.warning("cannot start the agent: %s", e)
        self._watch_socket(self._agent[1], self._on_request)
        arenas = tuple(self._arenas.values())
        warm, key, modules = self._zygotes.warm, self._zygotes.key, self._zygotes.modules
        ranks = tuple(self.ranks.values())
        self._send_agent(
            HolderListing(
                ranks=ranks,
                arena=self.arena,
                arenas=arenas,
                warm=warm,
                key=key,
                modules=modules,
                lost=self._lost_agent,
            )
        )

    def _fork_agent(self) -> tuple[int, socket.socket]:
        """Fork the agent; return its pid and our end of the socket to it.

        A fork saves the imports, which take from one to ten seconds. Until the agent runs, the node sends no beats, so
        the controller takes it for silent.
        """
        log = open_log(str(self.node_dir / "agent.log"))
        ours, theirs = holder_messages.make_socket_pair()
        end = theirs.detach()
        program = Program(module=agent.__name__, args=(str(self.node_dir), str(end)), env=dict(os.environ))
        files = OpenFiles(stdout=log, stderr=log, keep=(end,))
        try:
            pid = preimported_fork.fork(program, files, lambda: self._close_inherited(ours), tied=True)
        except OSError:
            for fd in (log, end, ours.detach()):
                os.close(fd)
            raise
        os.close(log)
        os.close(end)
        ours.settimeout(10.0)
        return pid, ours

    def _close_inherited(self, end: socket.socket) -> None:
        """In a forked child, close the holder's sockets and selector, and undo its signal wakeup."""
        signal.set_wakeup_fd(-1)
        end.close()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket | ZygoteLog)
            key.fileobj.close()
        self._selector.close()
        self._waker.close()

    def _watch_socket(self, sock: socket.socket, heard: Callable[[socket.socket], None]) -> None:
        self._selector.register(sock, selectors.EVENT_READ, heard)

    def _watch_log(self, log: ZygoteLog) -> None:
        self._selector.register(log, selectors.EVENT_READ, self._copy_log)

    def _copy_log(self, log: ZygoteLog) -> None:
        if not log.copy_lines():
            self._selector.unregister(log)
            log.close()

    def _send_agent(self, message: holder_messages.ToAgent) -> None:
        if self._agent:
            try:
                self._agent[1].send(holder_messages.encode(message))
            except OSError:
                pass  # the agent is gone; the next one gets the listing

    def _on_request(self, sock: socket.socket) -> None:
        packet = child_process.receive_packet(sock, holder_messages.PACKET_BYTES)
        if not packet:
            self._drop_socket(sock)  # it is reaped presently
            return
        match holder_messages.to_holder(packet):
            case ExecRank() as request:
                self._exec_rank(request)
            case holder_zygote_messages.ForkRank() as request:
                if not self._zygotes.forking:
                    self._unclaimed.clear()  # left by a birth that failed; their pids may come again
                self._zygotes.fork(request)
            case PreloadZygote() as request:
                self._zygotes.ensure_zygote(request)
            case MakeArena() as request:
                self._make_arena(request)
            case KillRank(key=key, signal=number):
                if key in self.ranks and self.ranks[key].code is None:
                    child_process.signal_group(self.ranks[key].pid, number)
            case RekeyRank() as request:
                self._rekey_rank(request)
            case ForgetRank(key=key):
                if key in self.ranks and self.ranks[key].code is not None:
                    del self.ranks[key]
            case SweepLeftovers():
                self._sweep_until = time.monotonic() + _SWEEP_S
            case QuitHolder(code=code):
                self._request_exit(code)

    # --- ranks -------------------------------------------------------------------------------------------------

    def _exec_rank(self, request: ExecRank) -> None:
        files = [own_process_settings.open_input(request.stdin)]
        try:
            for path in (request.stdout, request.stderr):
                files.append(open_log(path))
            pid = child_process.start(list(request.argv), request.env, request.cwd, (files[0], files[1], files[2]))
        except OSError as e:
            self._send_agent(StartRefused(key=request.key, error=str(e)))
        else:
            self._register_rank(request.key, pid)
        finally:
            for fd in files:
                os.close(fd)

    def _register_rank(self, key: str, pid: int) -> None:
        self.ranks[key] = HolderRank(key=key, pid=pid)
        self._send_agent(RankStarted(key=key, pid=pid))
        if pid in self._unclaimed:
            self._record_exit(key, *self._unclaimed.pop(pid))

    def _rekey_rank(self, request: RekeyRank) -> None:
        rank = self.ranks.get(request.old)
        if rank is None or rank.code is not None:
            self._send_agent(StartRefused(key=request.key, error="it has ended"))
            return
        del self.ranks[request.old]
        self._register_rank(request.key, rank.pid)

    def _on_forked(self, key: str, pid: int) -> None:
        self._register_rank(key, pid)
        self._forget_strangers()

    def _forget_strangers(self) -> None:
        if not self._zygotes.forking:
            self._unclaimed.clear()  # nobody will ask for these any more, and their pids may come again

    def _record_exit(self, key: str, code: int, at: float) -> None:
        self.ranks[key] = msgspec.structs.replace(self.ranks[key], code=code, at=at)
        if code != 0:
            child_process.signal_group(self.ranks[key].pid, signal.SIGKILL)
        self._send_agent(RankEnded(rank=self.ranks[key]))

    def _sweep_orphans(self, until: float) -> None:
        """Kill all children but ranks, zygotes and the agent. Send a SweepDone when none is left or time is up."""
        self._reap_children()
        if self._zygotes.forking and time.monotonic() < until:
            return  # such a child is not known to be a rank before its zygote has told so
        keep = {rank.pid for rank in self.ranks.values() if rank.code is None}
        keep |= self._zygotes.pids | ({self._agent[0]} if self._agent else set())
        left = [pid for pid in own_process_settings.list_children() if pid not in keep]
        if left and time.monotonic() < until:
            child_process.kill_all(left)
            return
        self._sweep_until = None
        self._send_agent(SweepDone(left=tuple(left)))

    def _reap_children(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._on_child_exit(pid, os.waitstatus_to_exitcode(status), time.monotonic())

    def _on_child_exit(self, pid: int, code: int, at: float) -> None:
        key = next((r.key for r in self.ranks.values() if r.pid == pid and r.code is None), None)
        if key is not None:
            self._record_exit(key, code, at)
        elif self._agent and pid == self._agent[0]:
            self._drop_socket(
                self._agent[1]
            )  # unheard: what it still asked for, its successor will be told to do again
            self._agent, self._lost_agent = None, describe_own_exit(code)
            if self.code is None:
                self._start_agent()
        elif not self._zygotes.on_child_exit(pid, code) and self._zygotes.forking:
            self._unclaimed[pid] = (code, at)
        self._forget_strangers()

    # --- memory ------------------------------------------------------------------------------------------------

    def _make_arena(self, request: MakeArena) -> None:
        """Make an arena of this name, unless one of the same size exists. An arena of another size is discarded."""
        kept = self._arenas.get(request.name)
        if kept is not None and kept.bytes != request.bytes:
            os.close(int(kept.path.rpartition("/")[2]))
            kept = None
        if kept is None:
            fd = os.memfd_create(f"holdfast-{request.name}")
            os.ftruncate(fd, request.bytes)
            kept = KeptArena(name=request.name, bytes=request.bytes, path=f"/proc/{os.getpid()}/fd/{fd}")
            self._arenas[request.name] = kept
        self._send_agent(ArenaMade(arena=kept))

    def _drop_socket(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self._selector.unregister(sock)
            sock.close()

    # --- the end -----------------------------------------------------------------------------------------------

    def _kill_all(self) -> None:
        """Kill all processes below the holder, however deep, until none is left or time is up; remove holder.pid."""
        until = time.monotonic() + _END_S
        while (left := own_process_settings.list_children()) and time.monotonic() < until:
            child_process.kill_all(left)
            self._reap_quietly()
            time.sleep(0.01)
        for key in self._selector.get_map().values():
            if isinstance(key.fileobj, ZygoteLog):
                key.fileobj.copy_rest()
        (self.node_dir / "holder.pid").unlink(missing_ok=True)

    def _reap_quietly(self) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def prepare() -> None:
    """Load the failure catalog in a process from which many holders are forked, so that their agents have it."""
    last_words_judge.warm_catalog(catalog_files.load_built_in())


def main() -> int:
    keep_masked_log(logging.StreamHandler(sys.stderr), make_secret_masker())
    own_process_settings.become_subreaper()
    return Holder(Path(sys.argv[1])).run()


if __name__ == "__main__":
    preimported_fork.run(main)
