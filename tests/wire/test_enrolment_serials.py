"""A certificate counts where its serial is known, and the next controller knows it before the node does."""

import ssl
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.launch.enrolment_client import EnrolmentClient, NoAnswerError
from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.access.node_enrolment import NodeEnrolment
from holdfast.core.decide.decider import Decider
from holdfast.wire.credentials import certificate_authority, mutual_tls
from tests.controller.fakes import admission_of
from tests.wire.test_enrolment import AWAY, TOKEN, Server
from tests.wire.test_enrolment import server as server


def shown_by(certificate: Path) -> dict[str, Any]:
    shown: dict[str, Any] = ssl._ssl._test_decode_cert(str(certificate))  # type: ignore[attr-defined]
    return shown


def test_a_certificate_counts_only_where_its_serial_is_known_and_another_host_knows_it_first(
    server: Server, tmp_path: Path
) -> None:
    call = EnrolmentClient(server.address, TOKEN)
    shown = shown_by(call.enrol_node("a", tmp_path / "a").certificate)
    call.close()
    assert server.published[-1] == {"a": mutual_tls.certificate_serial(shown)}, "before the host had its answer"
    assert not server.refusal_of(shown)
    made = server.authority.sign_node("b", certificate_authority.request_pem(certificate_authority.make_key()))
    (tmp_path / "b.pem").write_bytes(made)  # signed by our authority, and by no controller that the job knows
    unknown = shown_by(tmp_path / "b.pem")
    assert mutual_tls.certificate_node(unknown) == "b"
    assert server.refusal_of(unknown) == "the certificate of b is no longer valid"


def test_a_host_waits_while_a_controller_of_another_host_could_not_know_it(server: Server, tmp_path: Path) -> None:
    server.away = True
    call = EnrolmentClient(server.address, TOKEN)
    with pytest.raises(NoAnswerError, match=AWAY):
        call.enrol_node("a", tmp_path / "a")
    call.close()
    assert not (tmp_path / "a").exists()


def test_a_node_whose_line_was_damaged_is_known_again_by_its_certificate(server: Server, tmp_path: Path) -> None:
    """One changed byte kept a node out for ever, without a word."""
    call = EnrolmentClient(server.address, TOKEN)
    shown = shown_by(call.enrol_node("a", tmp_path / "a").certificate)
    call.close()
    serial = mutual_tls.certificate_serial(shown)
    path = server.authority.node_serials().path
    path.write_bytes(path.read_bytes().replace(serial.encode(), serial[:-1].encode() + b"g"))
    view, said = Decider().view, list[str]()
    certificates = NodeCertificates(view, lambda node: False, said.append)
    again = NodeEnrolment(
        server.authority,
        TOKEN,
        "r",
        audit=AuditLog(tmp_path),
        tokens=server.tokens,
        certificates=certificates,
        admission=admission_of(server.blocked),
        announce=server.refused.append,
    )
    assert len(said) == 1 and f"{path}: " in said[0]
    assert again.certificate_refusal(shown) == "" == again.certificate_refusal(shown)
    assert said[1:] == ["a is known again by its certificate"] and certificates.serial_of("a") == serial
    assert server.authority.node_serials().serials == {"a": serial}
    made = server.authority.sign_node("b", certificate_authority.request_pem(certificate_authority.make_key()))
    (tmp_path / "b.pem").write_bytes(made)
    refused = again.certificate_refusal(shown_by(tmp_path / "b.pem"))
    assert refused == "the certificate of b is no longer valid", "one line, one node"


def test_a_node_that_the_job_counts_on_and_that_is_refused_is_told_once(tmp_path: Path) -> None:
    said, view = list[str](), msgspec.defstruct("View", [("active", frozenset[str])])(frozenset({"a"}))
    certificates = NodeCertificates(view, lambda node: False, said.append)  # type: ignore[arg-type]
    for node in ("a", "stranger", "a"):
        certificates.tell_refusal(node, "its certificate is no longer valid")
    assert said == ["a is refused at the port: its certificate is no longer valid"]
