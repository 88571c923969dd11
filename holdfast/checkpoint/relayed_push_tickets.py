"""Tickets for pushing to a keeper: with a ticket, a peer may open one connection that a relay of the keeper decrypts.

A relay is a process of its own. A keeper grants a limited number of tickets, and only when it accepts a push from an
authenticated peer, so no stranger can make it start a process. The peer sends its ticket in clear text before TLS
begins. An overheard ticket is of no use, because the relay checks certificates as on every connection.
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
    """A keeper's open tickets and the number of its running relays, shared by its threads."""

    def __init__(self, most: int) -> None:
        """`most` limits open tickets and running relays together; 0 allows none."""
        self._most = most
        self._open: dict[str, tuple[str, float]] = {}  # for which node, and until when
        self._running = 0
        self._lock = threading.Lock()

    def grant(self, node: str, wanted: int) -> tuple[str, ...]:
        """Return up to `wanted` tickets for this node, at most half of the free ones, as other nodes may push too."""
        now = time.monotonic()
        with self._lock:
            self._open = {ticket: one for ticket, one in self._open.items() if now < one[1]}
            left = self._most - self._running - len(self._open)
            granted = tuple(secrets.token_hex(_DIGITS // 2) for _ in range(min(wanted, (left + 1) // 2)))
            self._open |= dict.fromkeys(granted, (node, now + _TICKET_S))
            return granted

    def redeem(self, link: socket.socket) -> str:
        """Read a ticket from a connection. Return the node that the ticket was granted to, or "" if no valid ticket is
        shown. If a node was returned, call `end_relay` when the connection has ended."""
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
