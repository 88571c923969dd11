"""TLS by the kernel (kTLS): whether this kernel has it, which is asked of it, and what it would gain a copy.

The kernel is asked on a real connection for its upper layer protocol "tls", which also loads the module if there is
one. Where it has it, bytes go over links with and without OpenSSL's option for it, in turns, and the kernel's own
counters tell whether it was used.
"""

import contextlib
import multiprocessing
import os
import platform
import resource
import socket
import ssl
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from holdfast.linux import own_process_settings
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.credentials.mutual_tls import KeyFiles

_TCP_ULP = 31  # of linux/tcp.h; the socket module has no name for it
_ENABLE = ssl.Options(1 << 3)  # SSL_OP_ENABLE_KTLS, which the ssl module names from Python 3.12 on
_COUNTERS = Path("/proc/net/tls_stat")
_USED = ("TlsTxSw", "TlsTxDevice")
_CHUNK = 1 << 20


class Gain(NamedTuple):
    """Of the same bytes by TLS of the kernel and of the process: medians of ratios, kernel over process."""

    speed: float
    sender_cpu: float
    links: int  # that the kernel encrypted; 0: OpenSSL did not let it


def missing_ktls() -> str:
    """Return why the kernel does no TLS; "" if it does."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        link = stack.enter_context(socket.create_connection(listener.getsockname()))
        stack.enter_context(listener.accept()[0])
        try:
            link.setsockopt(socket.IPPROTO_TCP, _TCP_ULP, b"tls")
        except OSError as e:
            return f"Linux {platform.release()} has no kernel TLS: asked for the protocol 'tls', it says '{e.strerror}'"
    return ""


def measure_gain(folder: Path, size: int, rounds: int) -> Gain:
    """Send so many bytes over links with and without kTLS, in turns."""
    authority = CertificateAuthority(folder / "authority")
    near, far = (enrol_local_node(authority, name, folder / name) for name in ("near", "far"))
    before = _links_by_kernel()
    pairs = [(_send(near, far, size, kernel=True), _send(near, far, size, kernel=False)) for _ in range(rounds)]
    speed = statistics.median(ours[0] / theirs[0] for theirs, ours in pairs)
    cpu = statistics.median(theirs[1] / ours[1] for theirs, ours in pairs)
    return Gain(speed, cpu, _links_by_kernel() - before)


def _links_by_kernel() -> int:
    try:
        lines = [line.split() for line in _COUNTERS.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(count) for name, count in lines if name in _USED)


def _send(near: KeyFiles, far: KeyFiles, size: int, *, kernel: bool) -> tuple[float, float]:
    """Return the seconds until all has arrived, and those of the sender's processor."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    taker = spawn.Process(target=_take, args=(theirs, far, size), daemon=True)
    taker.start()
    theirs.close()
    try:
        context = mutual_tls.client_tls(near, controller=False)
        if kernel:
            context.options |= _ENABLE
        with socket.create_connection(mine.recv()) as link, context.wrap_socket(link) as proved:
            chunk, began, spent = bytes(_CHUNK), time.perf_counter(), _own_cpu_s()
            for _ in range(size // _CHUNK):
                proved.sendall(chunk)
            spent = _own_cpu_s() - spent
            mine.recv()
            return time.perf_counter() - began, spent
    finally:
        taker.kill()
        taker.join()


def _take(parent: Connection, keys: KeyFiles, size: int) -> None:
    own_process_settings.die_with(os.getppid())
    context = mutual_tls.server_tls(keys, strangers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.send(listener.getsockname())
        link = listener.accept()[0]
        with link, context.wrap_socket(link, server_side=True) as proved:
            memory = memoryview(bytearray(_CHUNK))
            while size > 0 and (got := proved.recv_into(memory)):
                size -= got
            parent.send(None)
            parent.recv()  # until we are killed


def _own_cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime
