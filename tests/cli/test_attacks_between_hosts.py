"""Another user of a machine on which hosts of a job run: the TLS port, the keepers and the store, as he finds them."""

import contextlib
import json
import os
import socket
import ssl
import time
from pathlib import Path

import psutil
import pytest

from holdfast.wire.credentials import enrolment, mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from tests.cli.conftest import Start
from tests.cli.driver import TRAIN
from tests.cli.test_attacks import as_another
from tests.cli.test_join import host, leader_of, port
from tests.cli.test_run_attacked import keeper_port
from tests.cli.test_run_state import TRAIN as SNAPSHOTS

__all__ = ["port"]
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user"),
]
"localhost".encode("idna")  # which he could not import
_ASK = b'{"verb":"pull","rank":0,"world":2,"step":1,"layout":"ab","ranges":[[0,64]]}\n'
_SHOWN = ("", "X-Holdfast-Token: guess\r\n", "Authorization: Bearer \r\n")
_PATHS = ("/api/v1/status", "/api/v1/entries?after=0", f"/api/v1/releases/{'0' * 64}", "/agent", "/metrics")


def said(to: tuple[str, int], words: bytes, context: ssl.SSLContext | None) -> bytes:
    """What whoever listens there answers; b"": it hangs up, or takes us for nobody."""
    try:
        with socket.create_connection(to, timeout=20) as bare:
            link = context.wrap_socket(bare) if context else bare
            link.settimeout(20)
            link.sendall(words)
            return link.recv(4096)
    except (ssl.SSLError, ConnectionError):
        return b""


def get(path: str, shown: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{shown}\r\n".encode()


def post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def codes(to: tuple[str, int], context: ssl.SSLContext | None, requests: list[bytes]) -> str:
    """The codes of all answers, by HTTP; of what is none there is no code."""
    answers = [said(to, request, context).split() for request in requests]
    return str(sorted({words[1].decode() for words in answers if len(words) > 1 and words[0].startswith(b"HTTP")}))


@pytest.fixture
def strangers(tmp_path: Path) -> dict[str, ssl.SSLContext | None]:
    """How he may call: without TLS, without a certificate, and with one that an authority of his own has signed."""
    keys = enrol_local_node(CertificateAuthority(tmp_path / "theirs"), "n0", tmp_path / "thief")
    own = mutual_tls.client_tls(keys, controller=False)
    own.check_hostname, own.verify_mode = False, ssl.CERT_NONE
    return {"plain": None, "no certificate": mutual_tls.unproved_tls(), "his own certificate": own}


def test_he_calls_at_the_port_and_at_keepers(
    start: Start, port: int, strangers: dict[str, ssl.SSLContext | None]
) -> None:
    flags = ("--nnodes", "2", "--nproc-per-node", "1")
    jobs = [host(start, f"127.0.0.1:{port}", *flags, name=name, script=SNAPSHOTS) for name in ("one", "two")]
    leader = leader_of(*jobs)
    leader.until(lambda: leader.status().get("floor", 0) > 3, "copies on peers")
    door = ("127.0.0.1", port)
    asked = [get(path, shown) for path in _PATHS for shown in _SHOWN]
    nonces = ["a" * 64, "b" * 64]
    asked.append(post("/api/v1/orders", {"verb": "update", "release": {"number": 2, "env": {"LD_PRELOAD": "/x"}}}))
    enrol = post(enrolment.PATH, {"name": "n0", "host": "h", "nonces": nonces, "request": "", "proof": "0" * 64})
    for name, context in strangers.items():
        wanted = "['401']" if name == "no certificate" else "[]"
        assert as_another(lambda context=context: codes(door, context, asked)) == wanted, name  # type: ignore[misc]
        wanted = "['403']" if name == "no certificate" else "[]"
        assert as_another(lambda context=context: codes(door, context, [enrol])) == wanted, name  # type: ignore[misc]
        for job in jobs:
            keeper = ("127.0.0.1", keeper_port(job))
            heard = as_another(lambda to=keeper, context=context: str(said(to, _ASK, context)))  # type: ignore[misc]
            assert heard == "b''", (name, job.run_dir)
    before = leader.status()["step"]
    leader.until(lambda: leader.status()["step"] > before + 3, "training goes on")
    assert not leader.report().incidents
    leader.finish()
    for job in jobs:
        job.ends(0)


def disturb(to: tuple[str, int]) -> str:
    """Words that no client of a store says, on links that stay."""
    links = []
    for _ in range(50):
        link = socket.create_connection(to, timeout=20)
        with contextlib.suppress(OSError):
            link.sendall(b"\xff" * 4096)
        links.append(link)
    time.sleep(1.0)
    return f"{len(links)} links"


def test_he_calls_at_torchs_store(start: Start) -> None:
    """It knows no passwords, and SECURITY.md says so. It is at loopback alone, and what it is told stops no step."""
    job = start("--nnodes", "2", "--nproc-per-node", "1", script=TRAIN)
    job.trains()
    found = psutil.Process(job.store()).net_connections("inet")
    listening = [link.laddr for link in found if link.status == psutil.CONN_LISTEN]
    assert listening and {place.ip for place in listening} <= {"127.0.0.1", "::1"}
    for place in listening:
        assert as_another(lambda to=(place.ip, place.port): disturb(to)) == "50 links"  # type: ignore[misc]
    before = job.status()["step"]
    job.until(lambda: job.status()["step"] > before + 20, "training goes on")
    job.kill(job.rank(1))
    job.trains(generation=2)
    job.finish()
    job.ends(0)
