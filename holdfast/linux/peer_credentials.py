"""Who is at the other end of a unix socket: the kernel says it, nobody can claim it."""

import os
import socket
import struct
from typing import NamedTuple

_FORM = struct.Struct("3i")
_ROOT = 0


class Peer(NamedTuple):
    """As it was when the connection was made; of a server, when it began to listen."""

    pid: int
    user: int


def peer_of(sock: socket.socket) -> Peer:
    pid, user, _ = _FORM.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _FORM.size))
    return Peer(pid, user)


def may_order(peer: Peer) -> bool:
    """Whether somebody may tell us what to do: our own user, and root, who can do so anyway."""
    return peer.user in (os.getuid(), _ROOT)
