"""Identifies the process at the other end of a unix socket by what the kernel says, which cannot be forged."""

import os
import socket
import struct
from typing import NamedTuple

_FORM = struct.Struct("3i")
_ROOT = 0


class SocketPeer(NamedTuple):
    """The pid and user of the process at a socket's other end. The kernel takes them from a client at its connect call,
    and from a server at its listen call."""

    pid: int
    user: int


def read_peer(sock: socket.socket) -> SocketPeer:
    pid, user, _ = _FORM.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FORM.size))
    return SocketPeer(pid, user)


def may_order(peer: SocketPeer) -> bool:
    """Return whether the peer may give us orders: only our own user and root may."""
    return peer.user in (os.getuid(), _ROOT)
