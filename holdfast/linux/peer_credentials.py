"""Who is at the other end of a unix socket: the kernel says it, nobody can claim it."""

import os
import socket
import struct
from typing import NamedTuple

_FORM = struct.Struct("3i")
_ROOT = 0


class SocketPeer(NamedTuple):
    """As it was when the connection was made; of a server, when it began to listen."""

    pid: int
    user: int


def read_peer(sock: socket.socket) -> SocketPeer:
    pid, user, _ = _FORM.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FORM.size))
    return SocketPeer(pid, user)


def may_order(peer: SocketPeer) -> bool:
    """Whether somebody may tell us what to do: our own user, and root, who can do so anyway."""
    return peer.user in (os.getuid(), _ROOT)
