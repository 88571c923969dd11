"""Tickets by which a keeper lets peers open connections that processes of its own decrypt: few, and each good once.

A keeper grants them in its answer to a push that it has accepted, over a connection whose other end has proved itself.
So a stranger can start no process. The caller shows a ticket in clear text before TLS begins. It proves nothing to
whoever has overheard it: the relay checks certificates as on every connection.
"""

import secrets
import socket
import threading
import time
from typing import Annotated

import msgspec

_TICKET_S = 10.0  # until it is used
_DIGITS = 32
_TLS_FIRST = b"\x16"  # the first byte of a TLS handshake, which is no digit

Ticket = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


def show_ticket(link: socket.socket, ticket: str) -> None:
    link.sendall(ticket.encode())


class RelayTickets:
    """The tickets that are open, and the relays that run, of one keeper; its threads share it."""

    def __init__(self, most: int) -> None:
        """`most`: open tickets and running relays together; 0: none."""
        self._most = most
        self._open: dict[str, tuple[str, float]] = {}  # for which node, and until when
        self._running = 0
        self._lock = threading.Lock()

    def grant(self, node: str, wanted: int) -> tuple[str, ...]:
        """Return at most `wanted` tickets for this node, and half of those left: other copies may come at once."""
        now = time.monotonic()
        with self._lock:
            self._open = {ticket: one for ticket, one in self._open.items() if now < one[1]}
            left = self._most - self._running - len(self._open)
            granted = tuple(secrets.token_hex(_DIGITS // 2) for _ in range(min(wanted, (left + 1) // 2)))
            self._open |= dict.fromkeys(granted, (node, now + _TICKET_S))
            return granted

    def redeem(self, link: socket.socket) -> str:
        """Read a ticket if the caller shows one; return the node that it was granted to, or "" if it is not good.

        The caller of `redeem` calls `end_relay` later if it got a node.
        """
        if link.recv(1, socket.MSG_PEEK) == _TLS_FIRST:
            return ""
        shown = link.recv(_DIGITS).decode("ascii", "replace")
        with self._lock:
            node, until = self._open.pop(shown, ("", 0.0))
            if time.monotonic() >= until:
                return ""
            self._running += 1
            return node

    def end_relay(self) -> None:
        with self._lock:
            self._running -= 1
