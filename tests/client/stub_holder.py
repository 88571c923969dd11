"""A holder just big enough for the tests: parent and subreaper of a zygote, told what to fork line by line.

Executed, it reads its standard input and executes the zygote; forked by a fork server, it reads the file that was
passed on to it, and forks the zygote as a real holder does.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys

from holdfast.linux import preimported_fork
from holdfast.linux.preimported_fork import KEPT, OpenFiles, Program
from holdfast.wire.holder_zygote_messages import (
    PACKET_BYTES,
    ForkFailed,
    ForkRank,
    RankForked,
    ZygoteReady,
    encode,
    from_zygote,
)

PR_SET_CHILD_SUBREAPER = 36


def say(**news: object) -> None:
    print(json.dumps(news), flush=True)


def reap(keys: dict[int, str], ended: dict[int, int]) -> None:
    """Tell of ranks that have ended; one may do so before its Forked arrives."""
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        pass
    for pid in keys.keys() & ended.keys():
        say(key=keys.pop(pid), code=ended.pop(pid))


def start_zygote(ours: socket.socket, end: int, forked: bool) -> int:
    ranks = ("--ranks", os.environ.pop("STUB_RANKS", "0"))
    args = ("--fd", str(end), *ranks, *(word for name in sys.argv[1:] for word in ("--preload", name)))
    program = Program(module="holdfast.client.boot.zygote", args=args, env=dict(os.environ), bare=True)
    if forked:
        pid = preimported_fork.fork(program, OpenFiles(stdout=2, stderr=2, keep=(end,)), ours.close, tied=True)
    else:
        pid = subprocess.Popen(program.shown_argv(), pass_fds=[end], stdin=subprocess.DEVNULL).pid
    os.close(end)
    return pid


def wake_at_ends() -> int:
    """A file to be read when a child has ended: nobody looks for the dead a hundred times a second, while tests run."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    return woken


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ.pop("LC_CTYPE", None)  # Python sets it for itself where there is no locale
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET_BYTES)
    orders = int(os.environ.pop(KEPT, "0"))
    zygote = start_zygote(ours, theirs.detach(), forked=orders > 0)
    keys: dict[int, str] = {}
    ended: dict[int, int] = {}
    waiting = selectors.DefaultSelector()
    waiting.register(orders, selectors.EVENT_READ)
    waiting.register(ours, selectors.EVENT_READ)
    waiting.register(woken := wake_at_ends(), selectors.EVENT_READ)
    say(zygote=zygote)
    rest = b""
    while True:
        ready = {key.fd for key, _ in waiting.select()}
        if woken in ready:
            os.read(woken, 1 << 16)
        if orders in ready:
            text = os.read(orders, 1 << 20)
            if not text:
                break
            *lines, rest = (rest + text).split(b"\n")
            for line in lines:
                ours.send(encode(ForkRank(**json.loads(line))))
        if ours.fileno() in ready:
            packet = ours.recv(PACKET_BYTES)
            if not packet:
                waiting.unregister(ours)
                say(lost=zygote)
                continue
            match from_zygote(packet):
                case RankForked(key=key, pid=pid):
                    keys[pid] = key
                    say(key=key, pid=pid)
                case ForkFailed(key=key, error=error):
                    say(key=key, error=error)
                case ZygoteReady() as warm:
                    say(modules=warm.modules, threads=warm.threads, skipped=warm.skipped)
        reap(keys, ended)
    ours.close()
    for pid in keys:
        os.kill(pid, signal.SIGKILL)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main()
