"""Where no more files may be opened, links wait; they are answered as soon as there are some again."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

_FILES = 64
# It takes all files that it may have, says so, and gives them back when it is told to.
_TAKE_ALL = f"""
import os, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, ({_FILES}, {_FILES}))
def take_and_give_back():
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as e:
        print(e.errno, flush=True)
    sys.stdin.readline()
    for fd in taken:
        os.close(fd)
    sys.stdin.readline()
"""
_KEEPER = """
import socket
from holdfast.checkpoint.peer_server import PeerServer
from holdfast.checkpoint.peer_transport import PeerRefusal
listener = socket.socket(fileno=int(sys.argv[1]))
refuse = lambda *asked: PeerRefusal("nothing is kept here")
PeerServer(listener, None, refuse, refuse).start()
take_and_give_back()
"""
_PORT = """
import asyncio, socket
from aiohttp import web
from holdfast.controller.access.connection_gate import ConnectionGate
async def answer(request):
    return web.Response(text="here")
async def main():
    gate = ConnectionGate(web.Server(answer), None)
    running = asyncio.create_task(gate.run(socket.socket(fileno=int(sys.argv[1]))))
    await asyncio.sleep(0)
    thread = threading.Thread(target=take_and_give_back)
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.05)
    running.cancel()
asyncio.run(main())
"""
_ASKED = {
    "keeper": b'{"verb":"pull","rank":0,"step":1,"layout":"00"}\n',
    "port": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@contextmanager
def serving(script: str, listener: socket.socket) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that may have few files, and has used up all of them."""
    child = subprocess.Popen(
        [sys.executable, "-c", _TAKE_ALL + script, str(listener.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(listener.fileno(),),
    )
    assert child.stdin and child.stdout
    try:
        yield child
    finally:
        child.stdin.close()
        child.wait(60)
        child.stdout.close()


@pytest.mark.parametrize("which", _ASKED)
def test_who_calls_meanwhile_is_answered_later(tmp_path: Path, which: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving({"keeper": _KEEPER, "port": _PORT}[which], listener) as child,
    ):
        assert child.stdin and child.stdout
        assert int(child.stdout.readline()) == 24, "EMFILE"
        with contextlib.ExitStack() as links:
            callers = [links.enter_context(socket.create_connection(listener.getsockname(), 60)) for _ in range(3)]
            for caller in callers:
                caller.sendall(_ASKED[which])
                caller.settimeout(1.0)
            before = sum(psutil.Process(child.pid).cpu_times()[:2])
            with pytest.raises(TimeoutError):
                callers[-1].recv(1)  # the first may have a file that was kept for it
            assert sum(psutil.Process(child.pid).cpu_times()[:2]) - before < 0.5, (
                "it waits, and does not try all the time"
            )
            child.stdin.write(b"give them back\n")
            child.stdin.flush()
            for caller in callers:
                caller.settimeout(60)
                assert caller.recv(64), "it was not accepted after all"
            assert child.poll() is None
