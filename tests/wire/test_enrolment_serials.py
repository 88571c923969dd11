"""A certificate counts where its serial is known, and the next controller knows it before the node does."""

import ssl
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.launch.enrolment_client import EnrolmentClient, NoAnswerError
from holdfast.wire.credentials import certificate_authority, mutual_tls
from tests.wire.test_enrolment import TOKEN, Server
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
    assert mutual_tls.certificate_node(unknown) == "b" and "no longer valid" in server.refusal_of(unknown)


def test_a_host_waits_while_a_controller_of_another_host_could_not_know_it(server: Server, tmp_path: Path) -> None:
    server.away = True
    call = EnrolmentClient(server.address, TOKEN)
    with pytest.raises(NoAnswerError, match="the journal does not answer"):
        call.enrol_node("a", tmp_path / "a")
    call.close()
    assert not (tmp_path / "a").exists()
