"""The sockets that NCCL's service threads wait at are found by how they are used, and whoever polls them is woken."""

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from holdfast.client.survival.nccl_proxy_wakeups import find_proxy_sockets, woken_proxies

pytestmark = pytest.mark.timeout(60)
_UNIX_PATH = 108


class Proxy:
    """What a communicator has: a listening socket to which its own process is connected, and a named datagram socket,
    each polled by a thread for half a second, after which the thread looks whether it is to end."""

    def __init__(self, opened: ExitStack, family: socket.AddressFamily, host: str) -> None:
        self.listener = opened.enter_context(socket.create_server((host, 0), family=family))
        self.listener.setblocking(False)
        self.client = opened.enter_context(socket.create_connection(self.listener.getsockname()[:2]))
        select.select([self.listener], [], [], 10)
        self.accepted = opened.enter_context(self.listener.accept()[0])
        self.datagrams = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self.name = f"\0tmp/nccl-socket-3-{os.getpid():x}{id(self):x}".ljust(_UNIX_PATH, "\0")  # as NCCL names it
        self.datagrams.bind(self.name)
        self.aborted = threading.Event()
        self.ended_after: list[float] = []

    def serve(self, polled: socket.socket) -> None:
        until = time.monotonic() + 20
        while not self.aborted.is_set() and time.monotonic() < until:
            if select.select([polled], [], [], 20)[0]:
                self.take(polled)

    @staticmethod
    def take(polled: socket.socket) -> None:
        try:
            polled.accept()[0].close() if polled.type == socket.SOCK_STREAM else polled.recv(10)
        except BlockingIOError:
            pass


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


FAMILIES = [(socket.AF_INET, "127.0.0.1")]
if socket.has_dualstack_ipv6():
    FAMILIES.append((socket.AF_INET6, "::1"))


@pytest.mark.parametrize(("family", "host"), FAMILIES)
def test_what_this_process_is_connected_to_itself(opened: ExitStack, family: socket.AddressFamily, host: str) -> None:
    proxy = Proxy(opened, family, host)
    found = find_proxy_sockets()
    assert (int(family), *proxy.listener.getsockname()[:2]) in [(int(one[0]), *one[1:]) for one in found.listeners]
    assert proxy.name in found.datagrams


def test_other_listeners_are_left_alone(opened: ExitStack) -> None:
    alone = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    assert alone.getsockname()[1] not in [port for _, _, port in find_proxy_sockets().listeners]
    read, write = os.pipe()
    child = os.fork()
    if not child:  # another process is connected
        try:
            other = socket.create_connection(alone.getsockname())
            os.close(write)
            alone.close()
            os.read(read, 1)
            other.close()
        finally:
            os._exit(0)
    os.close(read)
    served = opened.enter_context(alone.accept()[0])
    assert served.fileno() >= 0
    assert alone.getsockname()[1] not in [port for _, _, port in find_proxy_sockets().listeners]
    os.close(write)
    os.waitpid(child, 0)


def test_both_threads_see_at_once_that_they_are_to_end(opened: ExitStack) -> None:
    proxy = Proxy(opened, *FAMILIES[0])
    threads = [
        threading.Thread(target=proxy.serve, args=(one,), daemon=True) for one in (proxy.listener, proxy.datagrams)
    ]
    for thread in threads:
        thread.start()
    with woken_proxies():
        proxy.aborted.set()
        for thread in threads:
            thread.join(15)
    assert not any(thread.is_alive() for thread in threads)


def test_nothing_is_left_when_the_abort_is_over(opened: ExitStack) -> None:
    Proxy(opened, *FAMILIES[0])
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    with woken_proxies():
        time.sleep(0.05)
    assert threading.active_count() == before[1]
    assert len(os.listdir("/proc/self/fd")) == len(before[0])
