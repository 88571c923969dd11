"""A process for one TLS link of a large copy: decrypts what a keeper sends, and passes it on through a unix socket.

Python returns decrypted bytes 16 KB at a time, and takes the interpreter's lock each time. So the links of one
process share about one core, however many threads read them. A relay has an interpreter of its own, and the process
that asked for it reads plain bytes in large pieces.

`python -m holdfast.checkpoint.tls_relay` is a relay. It dials, sends one line with the keeper's certificate or with
what went wrong, then carries bytes both ways until either side hangs up.
"""

import contextlib
import os
import select
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.decoding import from_json
from holdfast.model.state_copy import Address
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.mutual_tls import KeyFiles

_FEW_CORES = 3  # with so few, a relay takes the core that it is to spare
_PASS_BYTES = 1 << 20  # decrypted, and then passed on at once
_LINE_BYTES = 64 << 10
_WAIT_S = 30.0  # for a keeper that says nothing
_END_S = 5.0  # for a relay whose link is closed


class RelayStart(msgspec.Struct, frozen=True):
    """The first line from a relay: the certificate that the keeper has shown, or why there is no link."""

    certificate: dict[str, Any] = {}
    error: str = ""


def spares_a_core() -> bool:
    """Return whether this machine has the cores to gain from relays."""
    return len(os.sched_getaffinity(0)) > _FEW_CORES


@contextlib.contextmanager
def relayed_link(
    address: Address, keys: KeyFiles, accepts: Callable[[dict[str, Any]], bool]
) -> Iterator[socket.socket]:
    """Yield a link to a keeper by way of a relay, which ends with the link.

    Raises OSError if the keeper cannot be reached, or if `accepts` refuses its certificate.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            words = [str(theirs.fileno()), address[0], str(address[1]), *map(str, keys)]
            relay = subprocess.Popen(
                [sys.executable, "-P", "-m", "holdfast.checkpoint.tls_relay", *words],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},  # our code, and no other
                pass_fds=[theirs.fileno()],
            )
        try:
            ours.settimeout(_WAIT_S)
            start = _read_start(ours)
            if start.error:
                raise OSError(start.error)
            if not accepts(start.certificate):
                raise PermissionError("its certificate counts no more")
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


# --- the relay's own process -------------------------------------------------------------------------------------


def main() -> None:
    number, host, port, *files = sys.argv[1:]
    near = socket.socket(fileno=int(number))
    try:
        far = _dial_keeper((host, int(port)), KeyFiles(*map(Path, files)))
    except OSError as e:
        near.sendall(msgspec.json.encode(RelayStart(error=str(e))) + b"\n")
        return
    with contextlib.suppress(OSError):  # either side is gone, which the other one learns when we end
        near.sendall(msgspec.json.encode(RelayStart(certificate=dict(far.getpeercert() or {}))) + b"\n")
        _carry_bytes(near, far)


def _dial_keeper(address: Address, keys: KeyFiles) -> ssl.SSLSocket:
    link = socket.create_connection(address, timeout=_WAIT_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return mutual_tls.client_tls(keys, controller=False).wrap_socket(link)


def _carry_bytes(near: socket.socket, far: ssl.SSLSocket) -> None:
    buffer = memoryview(bytearray(_PASS_BYTES))
    while True:
        ready = [far] if far.pending() else select.select([near, far], [], [])[0]
        if near in ready:
            request = near.recv(_PASS_BYTES)
            if not request:
                return
            far.settimeout(_WAIT_S)
            far.sendall(request)
        if far in ready:
            count, ended = _decrypt_into(buffer, far)
            near.sendall(buffer[:count])
            if ended:
                return


def _decrypt_into(buffer: memoryview, far: ssl.SSLSocket) -> tuple[int, bool]:
    """Decrypt what has come, as far as there is room; return how many bytes, and whether the keeper has hung up."""
    far.settimeout(0)
    count = 0
    try:
        while count < len(buffer):
            came = far.recv_into(buffer[count:])
            if not came:
                return count, True
            count += came
    except ssl.SSLWantReadError:
        pass
    return count, False


if __name__ == "__main__":
    main()
