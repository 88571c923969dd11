"""The process behind one TLS connection of a large copy: decrypts what a keeper sends, and passes it to a unix socket.

`python -m holdfast.checkpoint.tls_relay_main FD HOST PORT KEY CERTIFICATE AUTHORITY` dials the keeper or, if HOST is
empty, takes over the accepted connection whose file descriptor is PORT. It sends one line with the keeper's certificate
or an error, then carries bytes both ways until either side hangs up. It needs only the standard library, to start
quickly.
"""

import contextlib
import json
import os
import select
import socket
import ssl
import sys
from pathlib import Path

from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.mutual_tls import KeyFiles

_PASS_BYTES = 1 << 20  # decrypted, and then passed on at once
_WAIT_S = 30.0  # for a keeper that says nothing


def main() -> None:
    number, host, port, *files = sys.argv[1:]
    near = socket.socket(fileno=os.dup(int(number)))  # the lowest number that is free: select() takes none above 1023
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PASS_BYTES)
    try:
        keys = KeyFiles(*map(Path, files))
        far = _dial_keeper((host, int(port)), keys) if host else _answer_keeper(int(port), keys)
    except OSError as e:
        near.sendall(json.dumps({"error": str(e)}).encode() + b"\n")
        return
    with contextlib.suppress(OSError):  # either side is gone, which the other one learns when we end
        near.sendall(json.dumps({"certificate": far.getpeercert()}).encode() + b"\n")
        _carry_bytes(near, far)


def _dial_keeper(address: tuple[str, int], keys: KeyFiles) -> ssl.SSLSocket:
    link = socket.create_connection(address, timeout=_WAIT_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return mutual_tls.client_tls(keys, controller=False).wrap_socket(link)


def _answer_keeper(number: int, keys: KeyFiles) -> ssl.SSLSocket:
    link = socket.socket(fileno=os.dup(number))
    link.settimeout(_WAIT_S)
    return mutual_tls.server_tls(keys, strangers=False).wrap_socket(link, server_side=True)


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
    """Decrypt bytes that have arrived, up to a full buffer; return their count, and whether the keeper has hung up."""
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
