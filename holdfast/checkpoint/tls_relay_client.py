"""Connections between keepers for large copies between hosts, each decrypted by a process of its own.

Python returns decrypted bytes 16 KB at a time, and takes the interpreter's lock each time. So the TLS connections of
one process share about one core, however many threads read them. A relay (tls_relay_main.py) has an interpreter of its
own, and the process that started it reads plain bytes in large pieces.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.decoding import from_json
from holdfast.model.state_copy import Address
from holdfast.wire.credentials.mutual_tls import KeyFiles

REVOKED = "its certificate is no longer accepted"
_FEW_CORES = 3  # with so few, a relay takes the core that it is to spare
_MOST_RELAYS = 16  # of pushes that come in
_LINE_BYTES = 64 << 10
_WAIT_S = 60.0  # for a relay that says nothing; it gives up on the keeper before
_END_S = 5.0  # for a relay whose link is closed


class RelayStart(msgspec.Struct, frozen=True):
    """The first line from a relay: the certificate that the keeper has shown, or why there is no connection."""

    certificate: dict[str, Any] = {}
    error: str = ""


def spares_a_core() -> bool:
    """Return whether this machine has enough cores to gain from relays."""
    return len(os.sched_getaffinity(0)) > _FEW_CORES


def most_relays() -> int:
    """Return how many relays may receive pushes on this machine at once; half of the cores stay for training."""
    return min(_MOST_RELAYS, len(os.sched_getaffinity(0)) // 2) if spares_a_core() else 0


@contextlib.contextmanager
def relayed_link(
    far: Address | socket.socket, keys: KeyFiles, accepts: Callable[[dict[str, Any]], bool]
) -> Iterator[socket.socket]:
    """Yield a connection to a keeper through a relay process, which ends when the connection is closed. If `far` is an
    address, the relay connects to it. If `far` is an accepted connection, the relay takes it over.

    Raises OSError if the keeper cannot be reached, or if `accepts` refuses its certificate.
    """
    taken = [far] if isinstance(far, socket.socket) else []
    where = ["", str(far.fileno())] if isinstance(far, socket.socket) else [far[0], str(far[1])]
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            words = [str(theirs.fileno()), *where, *map(str, keys)]
            relay = subprocess.Popen(
                [sys.executable, "-PS", "-m", "holdfast.checkpoint.tls_relay_main", *words],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},  # our own code
                pass_fds=[link.fileno() for link in (theirs, *taken)],
            )
        for link in taken:
            link.close()
        try:
            ours.settimeout(_WAIT_S)
            start = _read_start(ours)
            if start.error:
                raise OSError(start.error)
            if not accepts(start.certificate):
                raise PermissionError(REVOKED)
            yield ours
        finally:
            ours.close()
            _await_end(relay)


def _read_start(link: socket.socket) -> RelayStart:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = link.recv(1)  # and not one more: the keeper's answer follows
        if not byte or len(line) > _LINE_BYTES:
            raise ConnectionError("the relay ended before it had a link")
        line += byte
    return from_json(bytes(line), RelayStart)


def _await_end(relay: "subprocess.Popen[bytes]") -> None:
    try:
        relay.wait(_END_S)
    except subprocess.TimeoutExpired:
        relay.kill()
        relay.wait()
