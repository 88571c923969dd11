"""Tickets for links that processes decrypt: few at a time, some for everybody, and none for ever."""

import socket
import time

import pytest

from holdfast.checkpoint.relayed_push_tickets import RelayTickets, show_ticket


def redeem(tickets: RelayTickets, shown: bytes) -> str:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(shown)
        return tickets.redeem(ours)


def test_copies_that_come_at_once_share_them() -> None:
    tickets = RelayTickets(16)
    assert [len(tickets.grant("a", 4)) for _ in range(8)] == [4, 4, 4, 2, 1, 1, 0, 0]
    assert RelayTickets(0).grant("a", 4) == ()
    assert RelayTickets(16).grant("a", 1 << 50) and not RelayTickets(16).grant("a", -3)


def test_a_ticket_counts_until_its_relay_has_ended() -> None:
    tickets = RelayTickets(2)
    (one,) = tickets.grant("a", 4)
    assert len(tickets.grant("b", 4)) == 1 and not tickets.grant("b", 4)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        show_ticket(theirs, one)
        theirs.sendall(b"\x16")
        assert tickets.redeem(ours) == "a"
        assert ours.recv(9) == b"\x16", "what follows it is TLS's"
    assert not tickets.grant("b", 4)
    tickets.end_relay()
    assert len(tickets.grant("b", 4)) == 1


def test_a_ticket_is_good_once_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    tickets = RelayTickets(4)
    first, second = tickets.grant("a", 4)
    assert redeem(tickets, first.encode()) == "a"
    assert redeem(tickets, first.encode()) == ""
    clock[0] += 10.0
    assert redeem(tickets, second.encode()) == ""
    assert len(tickets.grant("b", 4)) == 2, "one relay runs"


@pytest.mark.parametrize("shown", [b"\x16\x03\x01", b"0" * 32, b"\xff" * 40, b"0"])
def test_what_is_no_ticket(shown: bytes) -> None:
    tickets = RelayTickets(4)
    tickets.grant("a", 4)
    assert redeem(tickets, shown) == ""
    assert len(tickets.grant("a", 4)) == 1, "it costs nobody a relay"
