"""An agent's end of the packet socket to its holder."""

import contextlib
import socket

from holdfast.wire import holder_messages


class HolderConnection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)

    def send(self, message: holder_messages.ToHolder) -> None:
        packet = holder_messages.encode(message)
        if len(packet) > holder_messages.PACKET_BYTES:
            raise ValueError(
                f"arguments and environment take {len(packet)} bytes, and the limit is {holder_messages.PACKET_BYTES}"
            )
        with contextlib.suppress(BlockingIOError):
            self.sock.send(packet)
            return
        self.sock.setblocking(True)  # the holder is busy for a moment; it never waits for us
        self.sock.send(packet)
        self.sock.setblocking(False)
