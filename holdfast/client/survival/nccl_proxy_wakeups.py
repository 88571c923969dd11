"""Shortens an abort of NCCL's communicators by half a second.

An abort waits for the two service threads of each communicator. They see the abort flag only when their poll returns:
after 500 ms, or when something comes to their sockets. So while an abort goes on, something comes again and again: a
connection that is closed at once, and an empty datagram. NCCL drops both, and reads the flag.
"""

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_AGAIN_S = 0.01
_LISTENING, _CONNECTED = "0A", "01"  # states in /proc/net/tcp
# The abstract names of the sockets that pass file descriptors. The kernel shows an at sign for each null byte.
_DATAGRAMS = re.compile(r"@[^\s@]*nccl-socket-[^\s@]+@*")
_WORD = 8  # hexadecimal digits of an address, in this machine's order of bytes

Address = tuple[int, str, int]  # family, host, port


class ProxySockets(NamedTuple):
    """Where NCCL's service threads of this process wait for messages."""

    listeners: list[Address]
    datagrams: list[str]  # abstract names, which begin with a null byte, and may end with some

    def wake(self) -> None:
        for family, host, port in self.listeners:
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as one:
                one.setblocking(False)
                one.connect((host, port))
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.setblocking(False)
            for name in self.datagrams:
                with suppress(OSError):
                    one.sendto(b"", name)


@contextmanager
def woken_proxies() -> Iterator[None]:
    """Wake NCCL's service threads of this process again and again while this block, an abort, is executed."""
    found, ended = find_proxy_sockets(), threading.Event()

    def wake() -> None:
        while not ended.wait(_AGAIN_S):
            found.wake()

    waking = threading.Thread(target=wake, name="holdfast-wake", daemon=True)
    waking.start()
    try:
        yield
    finally:
        ended.set()
        waking.join()


def find_proxy_sockets() -> ProxySockets:
    """Return the listening sockets by which this process is connected to itself, as it is to NCCL's proxies, and its
    sockets that have NCCL's names."""
    own = _own_inodes()
    listening: set[Address] = set()
    served: set[tuple[Address, Address]] = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in _read_rows(table):
            if row[9] not in own:
                continue
            ours, theirs = (_read_address(family, end) for end in row[1:3])
            if row[3] == _LISTENING:
                listening.add(ours)
            elif row[3] == _CONNECTED:
                served.add((ours, theirs))
    to_itself = {ours for ours, theirs in served if (theirs, ours) in served}
    names = [row[7] for row in _read_rows("unix") if len(row) > 7 and row[6] in own and _DATAGRAMS.fullmatch(row[7])]
    return ProxySockets(sorted(listening & to_itself), [name.replace("@", "\0") for name in names])


def _own_inodes() -> set[str]:
    links = set[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{number}"))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def _read_rows(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path("/proc/self/net", table).read_text("utf-8", "replace").splitlines()[1:]]
    except OSError:
        return []


def _read_address(family: int, told: str) -> Address:
    digits, _, port = told.partition(":")
    words = [digits[at : at + _WORD] for at in range(0, len(digits), _WORD)]
    content = b"".join(bytes.fromhex(word)[::-1] for word in words)
    return family, socket.inet_ntop(family, content), int(port, 16)
