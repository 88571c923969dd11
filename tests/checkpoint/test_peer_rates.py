"""How often one node may ask a keeper of another host, and that others do not wait for it."""

import socket
import threading
import time
from pathlib import Path

import pytest

from holdfast.checkpoint import peer_server
from holdfast.checkpoint.peer_admission import PeerAdmission
from holdfast.checkpoint.peer_server import PeerServer
from holdfast.checkpoint.peer_transport import PeerKeeper, PeerRefusal, TransportError, pull_state
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from tests.checkpoint.test_peer_transport import ASK, STATE, Keeper
from tests.cli.driver import until


def test_a_node_that_asks_without_end_is_slowed_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "_AT_ONCE", 3.0)
    monkeypatch.setattr(peer_server, "_A_SECOND", 2.0)
    keeper, authority = Keeper(len(STATE)), CertificateAuthority(tmp_path / "door")
    keeper.refuse = PeerRefusal("nothing is kept here")
    a, b, c = (PeerAdmission(enrol_local_node(authority, n, tmp_path / n), lambda node, serial: True) for n in "abc")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        PeerServer(listener, a, keeper.take, keeper.give).start()  # type: ignore[arg-type]

        def ask(guard: PeerAdmission, times: int) -> float:
            began = time.monotonic()
            for _ in range(times):
                with pytest.raises(TransportError):
                    pull_state(PeerKeeper(listener.getsockname(), guard), ASK, [memoryview(bytearray(1))])
            return time.monotonic() - began

        flooding = threading.Thread(target=ask, args=(b, 8))
        flooding.start()
        until(lambda: len(keeper.asked) >= 3, "the first requests")
        began = time.monotonic()
        ask(c, 3)
        assert flooding.is_alive() or time.monotonic() - began > 2.0, "c did not wait for b's turns"
        flooding.join()
        assert ask(b, 2) >= 0.4
