"""Asking NCCL's RAS: a server that answers as it does, one that does not, and none."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.rank.nccl_ras import ask_ras, ras_address
from holdfast.agent.rank.stack_tracer import StackRequest, StackTracer
from holdfast.core.diagnose.ras_status import RasWord, parse_ras
from holdfast.wire.holder_messages import HolderRank, RankKey

ANSWER = """#0-0 (d28fff848d19aad2) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 2 -- GPU 0 managed by process 1047 on node 127.0.0.1
"""


class RasServer:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_silent = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link, link.makefile("r") as lines:
                self.asked += [lines.readline().strip() for _ in range(3)]
                if self.is_silent:
                    self._over.wait(30)
                else:
                    link.sendall(f"SERVER PROTOCOL 2\nOK\n{ANSWER}".encode())


@pytest.fixture
def ras() -> Iterator[RasServer]:
    server = RasServer()
    yield server
    server.close()


def test_an_answer(ras: RasServer) -> None:
    assert ask_ras(ras.address, 5.0, SystemClock()).endswith(ANSWER)
    assert ras.asked == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "VERBOSE STATUS"]


def test_no_answer(ras: RasServer) -> None:
    ras.is_silent = True
    began = time.monotonic()
    assert ask_ras(ras.address, 1.0, SystemClock()) == ""
    assert time.monotonic() < began + 20


def test_an_answer_that_never_ends() -> None:
    """Of another user who listens there in place of NCCL; whatever the machine's load, so by a clock of its own."""

    class LateClock(SystemClock):
        def monotonic(self) -> float:
            self.asked = getattr(self, "asked", 0) + 1
            return 100.0 + self.asked

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            link, _ = listener.accept()
            with link, contextlib.suppress(OSError):
                while not over.is_set():
                    link.sendall(b"x")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        clock = LateClock()
        assert ask_ras(f"127.0.0.1:{listener.getsockname()[1]}", 5.0, clock) == ""
        over.set()
        thread.join(10)
    assert clock.asked < 10


@pytest.mark.parametrize("address", ["127.0.0.1:1", "", "nowhere", ":5", "127.0.0.1:99999999", "127.0.0.1:x"])
def test_nobody_there(address: str) -> None:
    assert ask_ras(address, 2.0, SystemClock()) == ""


def test_where_it_is() -> None:
    assert ras_address({}) == "localhost:28028"
    assert ras_address({"NCCL_RAS_ADDR": "127.0.0.1:5000"}) == "127.0.0.1:5000"
    assert ras_address({"NCCL_RAS_ADDR": "127.0.0.1:5000", "NCCL_RAS_ENABLE": "0"}) == ""


@pytest.mark.parametrize("first", [0, 4])
def test_one_node_asks_for_all(ras: RasServer, first: int) -> None:
    """Each question has all ranks of the job answer, so of thousands of nodes one asks."""
    tracer = StackTracer("n0", 1, SystemClock(), spy="/bin/false", ras=ras.address)
    ranks = (HolderRank(key=str(RankKey(1, first)), pid=os.getpid()),)
    trace = tracer.take_trace(StackRequest(ranks=ranks, deadline_s=5.0), None)
    assert parse_ras(trace.ras) == (() if first else (RasWord(rank=2, pid=1047),))
    assert bool(ras.asked) == (first == 0)
