"""Probe of the loopback interface: do connections within the node work, does the data arrive, and how fast?"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from statistics import median

from msgspec.structs import replace

from holdfast.agent.probes import ProbeRequest
from holdfast.model.probe_findings import Finding

_CHUNK = 1 << 20
_PATIENCE_S = 10.0
_TIMES = 8


def run(asked: ProbeRequest) -> Iterator[Finding]:
    size = (1 if asked.small else 16) * _CHUNK
    content = os.urandom(size)
    found = Finding(probe="loopback", level=1, ok=False, form=f"{size >> 20} MiB", unit="MB/s", rough=asked.small)
    try:
        took = [_time_echo(content) for _ in range(2 if asked.small else _TIMES)]
    except OSError as e:
        yield replace(found, detail=f"127.0.0.1: {e.strerror or e}")
        return
    if None in took:
        yield replace(found, detail="127.0.0.1: the content came back changed")
        return
    rates = tuple(round(2 * size / 1e6 / one, 3) for one in took if one)
    yield replace(found, ok=True, value=median(rates), samples=rates)


def _time_echo(content: bytes) -> float | None:
    """Return the seconds that the bytes take to an echo server and back; None if they are changed on the way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_PATIENCE_S)
        thread = threading.Thread(target=_serve_echo, args=(server,), daemon=True)
        thread.start()
        with socket.create_connection(server.getsockname(), timeout=_PATIENCE_S) as one:
            began = time.perf_counter()
            sender = threading.Thread(target=_send_content, args=(one, content), daemon=True)
            sender.start()
            back = bytearray()
            while chunk := one.recv(_CHUNK):
                back += chunk
            took_s = time.perf_counter() - began
            sender.join(_PATIENCE_S)
        thread.join(_PATIENCE_S)
    return took_s if back == content else None


def _serve_echo(server: socket.socket) -> None:
    try:
        other, _ = server.accept()
        with other:
            while chunk := other.recv(_CHUNK):
                other.sendall(chunk)
    except OSError:
        return  # the other side sees that too, and tells


def _send_content(one: socket.socket, content: bytes) -> None:
    try:
        one.sendall(content)
        one.shutdown(socket.SHUT_WR)
    except OSError:
        return  # what comes back is then not the same
