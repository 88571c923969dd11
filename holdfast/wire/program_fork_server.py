"""The fork server: a process that has imported what nodes, the store and the controller need, and forks them.

    python -u -m holdfast.agent.fork_server_main FD PARENT RANKS_MODULE... -- MODULE...
        [-- RANKS_MODULE... -- MODULE... -- S]

The server listens at FD and answers only its own user; a caller also checks that the server belongs to its user. It
imports each RANKS_MODULE for ranks, and each MODULE for other programs. It imports the modules in brackets later, after
S seconds without a request, so that no early caller waits for them. The server dies with its parent PARENT, but the
processes that it forked live on. With a server, ten nodes on a laptop import torch once, not twenty-one times.

A caller may also ask how a program that it forked has ended: only the parent of a process learns that.

A caller sends a program and its open files. The server answers that it has begun, the caller confirms that it still
wants the program, and the server returns the pid. A caller may give up before it confirms: then nothing is forked.
"""

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.decoding import from_msgpack
from holdfast.linux import own_process_settings, preimported_fork
from holdfast.linux.peer_credentials import read_peer
from holdfast.linux.preimported_fork import OpenFiles, Program
from holdfast.wire import unix_sockets

NAMED = "HOLDFAST_FORK_SERVER"  # in the environment: the socket of one that is there already
_NAME = "fork.sock"
_SERVER = "holdfast.agent.fork_server_main"
_HOLDER = "holdfast.agent.process_holder"
_CONTROLLER = "holdfast.cli.launch.controller_main"
_REQUEST_S = 10.0  # for all of a request to arrive
_BEGIN_S = 120.0  # until it is at it: the first one waits for all imports
_ANSWER_S = 60.0
_ASK_S = 1.0  # how often it is looked whether it can answer at all
_BACKLOG = 128
_MOST_FILES = 8
_MOST_EXITS = 4096  # that the server remembers
_EXIT_OF = ""  # no module: a question for the exit code of the pid in the arguments
_PART_BYTES = 1 << 16
_BEGUN = b"."
_WANTED = b"!"  # from here on the process may be there, whatever becomes of the answer
_LENGTH = struct.Struct("!I")
_LOOK_S = 0.01
_log = logging.getLogger("holdfast.fork_server")
NOT_YOURS = "the fork server belongs to another user"


class ForkAnswer(msgspec.Struct, frozen=True, kw_only=True):
    pid: int = 0
    error: str = ""
    code: int | None = None  # the exit code that was asked for; None: not known


class Later(msgspec.Struct, frozen=True):
    """Modules that the fork server imports after `quiet_s` seconds without a request, when ranks probably train."""

    modules: tuple[str, ...]
    quiet_s: float = 10.0


class ForkServer:
    """A fork server that this process started; it ends with this process, or when it is closed."""

    def __init__(
        self, path: Path, preload: Sequence[str], env: dict[str, str], log: int, later: "Later | None" = None
    ) -> None:
        """Start a fork server that listens at `path` and writes to `log`. It imports holdfast's own modules and
        `preload`, the modules that ranks import. When it is idle it also imports those of `later`."""
        self.path = path
        programs = (_HOLDER, *(("holdfast.client.boot.tcp_store_server",) if "torch" in preload else ()))
        # The first controller is executed, and the first holders prepare themselves, so there is time for that.
        rest = ("--", *later.modules, "--", _HOLDER, _CONTROLLER, "--", f"{later.quiet_s}") if later else (_CONTROLLER,)
        modules = ("holdfast.client.boot.zygote", *preload, "--", *programs, *rest)
        with unix_sockets.listen(path, backlog=_BACKLOG) as listener:
            args = (str(listener.fileno()), str(os.getpid()), *modules)
            self._process = subprocess.Popen(
                Program(module=_SERVER, args=args, env=env).exec_command(),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(listener.fileno(),),
            )

    def exit_code(self) -> int | None:
        """Return the server's exit code, or None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Kill the server at once, even while it imports; the processes that it forked live on."""
        self._process.kill()
        self._process.wait()
        self.path.unlink(missing_ok=True)


def socket_path(run_dir: Path) -> Path:
    """Return the path of the socket of a run's fork server."""
    named = os.environ.get(NAMED)
    return Path(named) if named else run_dir / _NAME


class ProgramProcess:
    """A running holdfast program, either forked by the fork server or executed by this process."""

    def __init__(self, pid: int, child: "subprocess.Popen[bytes] | None" = None) -> None:
        self.pid = pid
        self._child = child  # if we have executed it, we have to reap it
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1

    def is_over(self) -> bool:
        if self._child is not None:
            return self._child.poll() is not None
        if self._fd < 0:
            return True
        poll = select.poll()  # select() takes no file above 1023, and a controller has one for every node
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def exit_code(self) -> int | None:
        """Return the exit code of a program that this process executed; None while it runs, or if it was forked."""
        return self._child.poll() if self._child is not None else None

    def send_signal(self, number: int) -> None:
        try:
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            pass

    def kill(self) -> None:
        """Kill the process and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        while not self.is_over():
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Stop watching the process, and let it run on."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def start_program(program: Program, files: OpenFiles, server: Path | None, begin_s: float = _BEGIN_S) -> ProgramProcess:
    """Start a program: fork it by the fork server or, if no server begins in time, execute it. If OSError is raised,
    the program may have started all the same."""
    if server is not None:
        try:
            return ProgramProcess(_request_fork(server, program, files, begin_s))
        except NoForkServer:
            pass
    child = subprocess.Popen(
        program.exec_command(),
        env=program.env | files.kept_env(),
        cwd=program.cwd or None,
        stdin=subprocess.DEVNULL,
        stdout=files.stdout,
        stderr=files.stderr,
        start_new_session=True,
        pass_fds=files.keep,
    )
    return ProgramProcess(child.pid, child)


class NoForkServer(Exception):
    """There is no fork server, or it has ended, or the caller stopped waiting before the server began."""


def _await_start(server: socket.socket, pid: int, begin_s: float) -> None:
    """Wait for the fork server's first answer. Raise TimeoutError if the server is stopped or slow, and ConnectionError
    if it has ended."""
    until = time.monotonic() + begin_s
    server.settimeout(min(_ASK_S, begin_s))
    while time.monotonic() < until and own_process_settings.process_state(pid) not in ("T", "t"):
        try:
            if not server.recv(1):
                raise ConnectionResetError
            return
        except TimeoutError:
            continue
    raise TimeoutError


def find_exit_code(server: Path | None, pid: int) -> int | None:
    """Return how a program that the fork server forked has ended; None if it runs, or if nobody knows."""
    if server is None or not pid:
        return None
    question = Program(module=_EXIT_OF, args=(str(pid),), env={})
    try:
        with open(os.devnull, "wb") as nothing:
            return _request(server, question, (nothing.fileno(), nothing.fileno()), _ASK_S).code
    except (NoForkServer, OSError):
        return None


def _request_fork(path: Path, program: Program, files: OpenFiles, begin_s: float) -> int:
    answer = _request(path, program, (files.stdout, files.stderr, *files.keep), begin_s)
    if answer.error:
        raise OSError(answer.error)
    return answer.pid


def _request(path: Path, program: Program, files: Sequence[int], begin_s: float) -> ForkAnswer:
    packet = msgspec.msgpack.encode(program)
    try:
        server = unix_sockets.connect(path)
    except OSError:
        raise NoForkServer from None
    with server:
        pid, user = read_peer(server)
        if user != os.getuid():
            raise NoForkServer  # what it would be told, and what it would start, is none of its business
        try:
            server.settimeout(_ANSWER_S)
            packet = _LENGTH.pack(len(packet)) + packet
            sent = socket.send_fds(server, [packet], files)
            server.sendall(packet[sent:])
            _await_start(server, pid, begin_s)
        except OSError:
            raise NoForkServer from None
        server.settimeout(_ANSWER_S)
        server.sendall(_WANTED)
        return from_msgpack(b"".join(iter(lambda: server.recv(_PART_BYTES), b"")), ForkAnswer)


def main() -> NoReturn:
    own_process_settings.die_with_parent(int(sys.argv[2]))
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.listen(_BACKLOG)  # once more, so that who asks is told our pid and not our parent's
    if not sys.flags.safe_path:
        sys.path.pop(0)  # in the place of the working directory, from which nothing is imported
    ranks, programs, *later = _groups(sys.argv[3:])
    _have(ranks, programs, prepares=not later)
    rest = [(name, False) for name in later[0]] + [(name, True) for name in later[1]] if later else []
    quiet_s = float(later[2][0]) if later else 0.0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    signal.signal(signal.SIGCHLD, lambda *_: _reap_children())
    asked = False  # whoever started us will ask, however long that takes
    while True:
        if rest and asked and not select.select([listener], [], [], quiet_s)[0]:
            name, is_program = rest.pop(0)
            _have(() if is_program else (name,), (name,) if is_program else (), prepares=True)
            quiet_s = 0.0
            continue
        client, _ = listener.accept()
        _serve_client(client, (listener, client))
        asked = True


def _groups(words: list[str]) -> list[list[str]]:
    """Split the arguments into groups at each `--`."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return found


def _have(ranks: Sequence[str], programs: Sequence[str], prepares: bool) -> None:
    """Import modules for ranks and for programs. Forked zygotes do not see the modules that only programs need.
    `prepares` says whether the holder's module is prepared too."""
    gc.disable()  # imports make no garbage worth looking for
    _import_modules(ranks, prepares)
    seen = set(sys.modules)
    _import_modules(programs, prepares)
    preimported_fork.exclude_modules(set(sys.modules) - seen)
    gc.collect()
    gc.freeze()
    gc.enable()


def _import_modules(names: Sequence[str], prepares: bool) -> None:
    """Import these modules and skip those that fail. With `prepares`, also call `prepare` of the holder's module."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError as e:
            _log.warning("%s is not imported ahead: %s", name, e)
            continue
        if name == _HOLDER and prepares:
            module.prepare()


_exits: dict[int, int] = {}  # how children have ended, by pid; the newest


def _reap_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _exits.pop(ended[0], None)  # to the end, as the newest
            _exits[ended[0]] = os.waitstatus_to_exitcode(ended[1])
            if len(_exits) > _MOST_EXITS:
                del _exits[next(iter(_exits))]


def _serve_client(client: socket.socket, ours: tuple[socket.socket, ...]) -> None:
    files: list[int] = []
    try:
        client.settimeout(_REQUEST_S)
        program = _receive_program(client, files)
        stdout, stderr, *keep = files
        opened = OpenFiles(stdout=stdout, stderr=stderr, keep=tuple(keep))
        if program.module == _EXIT_OF:
            answer = ForkAnswer(code=_exits.get(int(program.args[0])))
        else:
            answer = ForkAnswer(pid=preimported_fork.fork(program, opened, lambda: _close_sockets(ours), tied=False))
    except (OSError, ValueError) as e:  # the latter for messages that cannot be decoded
        answer = ForkAnswer(error=f"the fork server cannot start it: {e}")
    for fd in files:
        os.close(fd)
    try:
        client.sendall(msgspec.msgpack.encode(answer))
    except OSError:
        pass  # it did not wait; what was started is found by its mark
    client.close()


def _receive_program(client: socket.socket, files: list[int]) -> Program:
    """Receive the program to start; the files received with it are added to `files` even if this raises."""
    client.sendall(_BEGUN)
    if read_peer(client).user != os.getuid():
        raise PermissionError(NOT_YOURS)
    packet, sent, _, _ = socket.recv_fds(client, _PART_BYTES, _MOST_FILES)
    files.extend(sent)
    if len(packet) < _LENGTH.size:
        raise ValueError("the message is too short")
    length = _LENGTH.unpack_from(packet)[0] + _LENGTH.size
    while len(packet) < length + len(_WANTED):
        part = client.recv(_PART_BYTES)
        if not part:
            raise ConnectionResetError("the caller hung up")
        packet += part
    return from_msgpack(packet[_LENGTH.size : length], Program)


def _close_sockets(ours: tuple[socket.socket, ...]) -> None:
    for one in ours:
        one.close()
