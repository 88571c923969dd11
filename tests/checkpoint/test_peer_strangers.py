"""Strangers at a keeper's port, from many addresses."""

import contextlib
import socket
import time
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpoint import peer_server
from holdfast.checkpoint.peer_admission import PeerAdmission
from holdfast.checkpoint.peer_server import PeerServer
from holdfast.checkpoint.peer_transport import (
    PeerKeeper,
    PeerRefusal,
    PeerRequest,
    RefusalCode,
    TransportError,
    fetch_content,
)
from holdfast.checkpoint.relayed_push_tickets import show_ticket
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node


def test_idle_strangers_of_many_hosts_push_out_nobody_who_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "_PROVE_S", 200.0)
    monkeypatch.setattr(peer_server, "_MOST_LINKS", 8)
    keys = enrol_local_node(CertificateAuthority(tmp_path / "ca"), "n0", tmp_path / "n0")
    guard, refusal = PeerAdmission(keys, lambda node, serial: True), PeerRefusal("nobody gets this far")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        PeerServer(listener, guard, lambda ask, node: refusal, lambda ask: refusal, 8).start()
        begun = stack.enter_context(socket.create_connection(listener.getsockname()))
        begun.sendall(b"\x16")
        for number in range(40):
            time.sleep(0.01)  # those that were sent away go
            link = socket.create_connection(listener.getsockname(), source_address=(f"127.3.0.{1 + number}", 0))
            stack.enter_context(link)
        begun.settimeout(0.2)
        with pytest.raises(TimeoutError):
            begun.recv(1)
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there


def test_strangers_that_speak_push_out_no_host_that_has_proved_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of TLS hellos at a keeper's port made copies and fetches fail for as long as it lasted."""
    monkeypatch.setattr(peer_server, "_PROVE_S", 200.0)
    monkeypatch.setattr(peer_server, "_MOST_LINKS", 8)
    keys = enrol_local_node(CertificateAuthority(tmp_path / "ca"), "n0", tmp_path / "n0")
    guard, refusal = PeerAdmission(keys, lambda node, serial: True), PeerRefusal("late", RefusalCode.SUPERSEDED)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        PeerServer(listener, guard, lambda ask, node: refusal, lambda ask: refusal, 8).start()
        where: tuple[str, int] = listener.getsockname()
        with pytest.raises(TransportError) as refused:
            fetch_content(PeerKeeper(where, guard), PeerRequest(verb="plan", rank=0, layout="aa"))
        assert refused.value.code is RefusalCode.SUPERSEDED
        begun = stack.enter_context(socket.create_connection(where))
        begun.sendall(b"\x16")
        for number in range(40):
            time.sleep(0.01)  # those that were sent away go
            link = socket.create_connection(where, source_address=(f"127.3.0.{1 + number}", 0))
            stack.enter_context(link).sendall(b"\x16")
        begun.settimeout(0.2)
        with pytest.raises(TimeoutError):
            begun.recv(1)
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there


@pytest.mark.parametrize("relayed", [False, True])
def test_a_node_that_has_left_gets_nothing_more_by_a_link_that_it_has(tmp_path: Path, relayed: bool) -> None:
    """It had only to keep the link open for as long as it liked."""
    authority = CertificateAuthority(tmp_path / "ca")
    ours, its = (enrol_local_node(authority, name, tmp_path / name) for name in ("n0", "n1"))
    members = {"n1"}
    guard, refusal = PeerAdmission(ours, lambda node, serial: node in members), PeerRefusal("no such state")
    asked = msgspec.json.encode(PeerRequest(verb="plan", rank=0, layout="aa")) + b"\n"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server = PeerServer(listener, guard, lambda ask, node: refusal, lambda ask: refusal, 8)
        server.start()
        plain = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=20))
        if relayed:
            [ticket] = server._tickets.grant("n1", 1)
            show_ticket(plain, ticket)
        link = stack.enter_context(mutual_tls.client_tls(its, controller=False).wrap_socket(plain))
        for _ in range(2):
            link.sendall(asked)
            assert b"no such state" in link.recv(1 << 12)
        members.clear()
        link.sendall(asked)
        assert not link.recv(1 << 12), "not even an answer"
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
