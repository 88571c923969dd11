"""Identifies the process at the other end of a unix socket by what the kernel says, which cannot be forged."""

import os
import socket
import struct
from typing import NamedTuple

_FORM = struct.Struct("3i")
_ROOT = 0


class SocketPeer(NamedTuple):
    """The peer's pid and user when the connection was made; for a server, when it began to listen."""

    pid: int
    user: int


def read_peer(sock: socket.socket) -> SocketPeer:
    pid, user, _ = _FORM.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FORM.size))
    return SocketPeer(pid, user)


def may_order(peer: SocketPeer) -> bool:
    """Return whether the peer may give us orders: our own user may, and root, who could anyway."""
    return peer.user in (os.getuid(), _ROOT)
