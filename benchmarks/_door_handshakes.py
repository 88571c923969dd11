"""What a TLS handshake costs the controller, and what the list of certificates that count adds to it.

Every node has a certificate of its own. Both sides are real contexts of ours over memory, so only one side's work is
counted. In a job with the list, what the node shows is looked up in it, and its welcome brings the list.
"""

import ssl
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.core.decide.decider import Decider
from holdfast.wire import agent_messages
from holdfast.wire.agent_messages import ControllerPacket, Welcome
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.credentials.certificate_authority import CertificateAuthority
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.credentials.node_serials import RecordedSerials

_BATCH = 50


class Handshakes(NamedTuple):
    """Medians of batches; milliseconds of a processor for one node."""

    server_ms: float  # the controller's side of a handshake
    agent_ms: float  # the node's side
    listed_ms: float  # the controller's look in the list, and the welcome with the list in it
    unlisted_ms: float  # a welcome without one
    welcome_bytes: int  # with the list
    made_ms: float  # the list itself, once for each change of it


def measure(folder: Path, agents: int) -> Handshakes:
    """Let each node shake hands once; `folder` has their certificates."""
    authority = CertificateAuthority(folder / "authority")
    at_port = mutual_tls.server_tls(authority.keys, strangers=True)
    certificates = NodeCertificates(Decider().view, lambda node: False, lambda text: None)
    recorded = authority.node_serials()
    made_ms = 1000 * statistics.median(_made_s(certificates, recorded) for _ in range(5))
    peers = certificates.admitted_peers()
    with_list, without = Welcome(at=0.0, beat_s=1.0, peers=peers), Welcome(at=0.0, beat_s=1.0)
    each: list[tuple[float, float, float, float]] = []
    for number in range(agents):
        own = mutual_tls.client_tls(KeyFiles.in_folder(folder / "nodes" / f"n{number}"), controller=True)
        server_s, agent_s, shown = _shake_hands(at_port, own)
        began = time.thread_time()
        node, serial = mutual_tls.certificate_node(shown), mutual_tls.certificate_serial(shown)
        if not certificates.is_valid(node, serial) or certificates.admitted_peers() is not peers:
            raise AssertionError(f"{node} is not in the list")
        _encode(with_list)
        looked_at = time.thread_time()
        _encode(without)
        each.append((server_s, agent_s, looked_at - began, time.thread_time() - looked_at))
    batches = [each[at : at + _BATCH] for at in range(0, len(each), _BATCH)]
    server_ms, agent_ms, listed_ms, unlisted_ms = (
        1000 * statistics.median(sum(one[side] for one in batch) / len(batch) for batch in batches) for side in range(4)
    )
    return Handshakes(
        server_ms, agent_ms, listed_ms, unlisted_ms, welcome_bytes=len(_encode(with_list)), made_ms=made_ms
    )


def _encode(welcome: Welcome) -> bytes:
    return agent_messages.encode(ControllerPacket(epoch=1, message=welcome))


def _made_s(certificates: NodeCertificates, recorded: RecordedSerials) -> float:
    certificates.take_recorded(recorded)
    began = time.thread_time()
    certificates.admitted_peers()
    return time.thread_time() - began


def _shake_hands(at_port: ssl.SSLContext, own: ssl.SSLContext) -> tuple[float, float, dict[str, object]]:
    """Return the seconds of a processor on both sides, and the certificate that the node has shown."""
    to_server, to_agent = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = at_port.wrap_bio(to_server, to_agent, server_side=True)
    agent = own.wrap_bio(to_agent, to_server, server_hostname=mutual_tls.CONTROLLER)
    spent = {server: 0.0, agent: 0.0}
    over: set[ssl.SSLObject] = set()
    while len(over) < 2:
        for side in (agent, server):
            began = time.thread_time()
            try:
                side.do_handshake()
                over.add(side)
            except ssl.SSLWantReadError:
                pass
            spent[side] += time.thread_time() - began
    return spent[server], spent[agent], dict(server.getpeercert() or {})
