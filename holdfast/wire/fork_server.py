"""The fork server: a process that has imported what holders, agents, zygotes and the store need, and forks them.

    python -u -m holdfast.wire.fork_server FD RANKS_MODULE... -- MODULE...

It listens at FD and answers its own user only; who asks looks, too, whose it is. It ends when its standard input does:
with whoever started it. What it has forked lives on. Ten nodes on a laptop so import torch once, not twenty-one times.
"""

import gc
import importlib
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.linux import python_fork
from holdfast.linux.python_fork import Files, Program
from holdfast.wire import unixpath

NAMED = "HOLDFAST_FORK_SERVER"  # in the environment: the socket of one that is there already
_NAME = "fork.sock"
_PROGRAMS = ("holdfast.agent.holder",)  # what is forked here, but for ranks
_REQUEST_S = 10.0  # for all of a request to arrive
_ANSWER_S = 120.0  # until a process is there; the first one waits for all imports
_MOST_FILES = 8
_PART_BYTES = 1 << 16
_BEGUN = b"."  # from here on the process may be there, whatever becomes of the answer
_LOOK_S = 0.01


class Forked(msgspec.Struct, frozen=True, kw_only=True):
    pid: int = 0
    error: str = ""


class ForkServer:
    """One that was started here; it ends with us, or when it is closed."""

    def __init__(self, path: Path, preload: Sequence[str], env: dict[str, str], log: int) -> None:
        """`preload`: what ranks import besides what is ours."""
        self.path = path
        store = ("holdfast.client.store",) if "torch" in preload else ()
        modules = ("holdfast.client.zygote", *preload, "--", *_PROGRAMS, *store)
        with unixpath.listen(path, backlog=128) as listener:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "holdfast.wire.fork_server", str(listener.fileno()), *modules],
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(listener.fileno(),),
            )

    def close(self) -> None:
        """At once, though it may be importing still; what it has forked lives on."""
        self._process.kill()
        self._process.communicate()
        self.path.unlink(missing_ok=True)


def path_of(run_dir: Path) -> Path:
    """Where the fork server of a run is asked."""
    named = os.environ.get(NAMED)
    return Path(named) if named else run_dir / _NAME


class Process:
    """A program of ours that runs beside us."""

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
        return self._fd < 0 or bool(select.select([self._fd], [], [], 0)[0])

    def kill(self) -> None:
        """It is gone when this returns."""
        try:
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        while not self.is_over():
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Whoever is told nothing more of it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def start(program: Program, files: Files, server: Path | None) -> Process:
    """Have a program forked, or execute it where there is no fork server. OSError: it may run, or may not."""
    if server is not None:
        try:
            return Process(_ask(server, program, files))
        except Unserved:
            pass
    child = subprocess.Popen(
        program.argv(),
        env=program.env,
        cwd=program.cwd or None,
        stdin=subprocess.DEVNULL,
        stdout=files.stdout,
        stderr=files.stderr,
        start_new_session=True,
        pass_fds=files.keep,
    )
    return Process(child.pid, child)


class Unserved(Exception):
    """There is no fork server, or it ended before it had begun."""


def _ask(path: Path, program: Program, files: Files) -> int:
    packet = msgspec.msgpack.encode(program)
    try:
        server = unixpath.connect(path)
    except OSError:
        raise Unserved from None
    with server:
        if _user_of(server) != os.getuid():
            raise Unserved  # what it would be told, and what it would start, is none of its business
        server.settimeout(_ANSWER_S)
        try:
            sent = socket.send_fds(server, [packet], [files.stdout, files.stderr, *files.keep])
            server.sendall(packet[sent:])
            server.shutdown(socket.SHUT_WR)
            begun = server.recv(1)
        except ConnectionError:
            begun = b""
        if not begun:
            raise Unserved
        answer = msgspec.msgpack.decode(b"".join(iter(lambda: server.recv(_PART_BYTES), b"")), type=Forked)
    if answer.error:
        raise OSError(answer.error)
    return answer.pid


def main() -> int:
    listener = socket.socket(fileno=int(sys.argv[1]))
    if not sys.flags.safe_path:
        sys.path.pop(0)  # nothing is imported from the working directory
    gc.disable()  # imports make no garbage worth looking for
    _import(sys.argv[2 : sys.argv.index("--")])
    seen = set(sys.modules)
    _import(sys.argv[sys.argv.index("--") + 1 :])
    python_fork.set_apart(set(sys.modules) - seen)
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that none of our children has to be reaped
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    while all(key.fd != 0 for key, _ in selector.select()):
        client, _ = listener.accept()
        _serve(client, (selector, listener, client))
    return 0


def _import(names: list[str]) -> None:
    """And do what the module wants done before anybody is forked. What cannot be had, whoever needs it will miss."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError as e:
            print(f"holdfast: {name} is not imported ahead: {e}", file=sys.stderr)
            continue
        if name in _PROGRAMS:
            module.prepare()


def _serve(client: socket.socket, ours: tuple[selectors.BaseSelector | socket.socket, ...]) -> None:
    files: tuple[int, ...] = ()
    try:
        client.settimeout(_REQUEST_S)
        client.sendall(_BEGUN)
        program, files = _request(client)
        stdout, stderr, *keep = files
        opened = Files(stdout=stdout, stderr=stderr, keep=tuple(keep))
        answer = Forked(pid=python_fork.fork(program, opened, lambda: _close(ours), tied=False))
    except (OSError, ValueError) as e:  # the latter for messages that cannot be decoded
        answer = Forked(error=f"the fork server cannot start it: {e}")
    for fd in files:
        os.close(fd)
    try:
        client.sendall(msgspec.msgpack.encode(answer))
    except OSError:
        pass  # it did not wait; what was started is found by its mark
    client.close()


def _request(client: socket.socket) -> tuple[Program, tuple[int, ...]]:
    """What shall be started, and with which files."""
    if _user_of(client) != os.getuid():
        raise PermissionError("the fork server is another user's")
    packet, files, _, _ = socket.recv_fds(client, _PART_BYTES, _MOST_FILES)
    packet += b"".join(iter(lambda: client.recv(_PART_BYTES), b""))
    return msgspec.msgpack.decode(packet, type=Program), tuple(files)


def _close(ours: tuple[selectors.BaseSelector | socket.socket, ...]) -> None:
    for one in ours:
        one.close()


def _user_of(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


if __name__ == "__main__":
    python_fork.run(main)
