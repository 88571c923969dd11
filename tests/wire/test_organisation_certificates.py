"""Certificates of a user's own authority: which are taken, and what is said of those that are not."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from holdfast.wire.credentials import mutual_tls, organisation_certificates
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.credentials.organisation_certificates import UserCertificateError
from tests.wire.given import Organisation


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Organisation:
    return Organisation(tmp_path_factory.mktemp("ours") / "ca")


def test_what_a_certificate_says(ours: Organisation, tmp_path: Path) -> None:
    found = organisation_certificates.check_certificates(ours.keys("host-1.example.org", "llama"))
    assert (found.node, found.run, found.leads) == ("host-1.example.org", "llama", True)
    found = organisation_certificates.check_certificates(ours.keys("n1", leads=False))
    assert (found.node, found.run, found.leads) == ("n1", "", False)
    copies = found.copy_to(tmp_path / "keys")
    assert [path.read_bytes() for path in copies] == [path.read_bytes() for path in found.keys]
    assert {stat.S_IMODE(path.stat().st_mode) for path in copies} == {0o600}


def _locked(keys: KeyFiles) -> None:
    how = serialization.BestAvailableEncryption(b"pass")
    kind = serialization.PrivateFormat.PKCS8
    keys.key.write_bytes(ec.generate_private_key(ec.SECP256R1()).private_bytes(serialization.Encoding.PEM, kind, how))


def _folder(keys: KeyFiles) -> None:
    keys.authority.unlink()
    keys.authority.mkdir()


BROKEN: dict[str, tuple[Callable[[KeyFiles], object], str]] = {
    "no key": (lambda keys: keys.key.unlink(), "door.key {0.key} "),
    "a folder": (
        _folder,
        "door.authority {0.authority} ",
    ),
    "bytes": (
        lambda keys: keys.certificate.write_bytes(b"\xff\0"),
        "door.certificate {0.certificate} ",
    ),
    "an empty authority": (
        lambda keys: keys.authority.write_bytes(b""),
        "door.authority {0.authority} ",
    ),
    "a passphrase": (_locked, "door.key {0.key} "),
}


@pytest.mark.parametrize("what", BROKEN)
def test_files_that_are_none(ours: Organisation, what: str) -> None:
    keys = ours.keys("n1")
    spoil, beginning = BROKEN[what]
    spoil(keys)
    with pytest.raises(UserCertificateError) as caught:
        organisation_certificates.check_certificates(keys)
    assert str(caught.value).startswith(beginning.format(keys))


def test_files_that_do_not_fit_together(ours: Organisation, tmp_path: Path) -> None:
    one, two, theirs = ours.keys("n1"), ours.keys("n2"), Organisation(tmp_path / "theirs").keys("n1")
    only_server = (ExtendedKeyUsageOID.SERVER_AUTH,)
    for keys, facts in (
        (one._replace(key=two.key), ("door.key {0.key}", "door.certificate {0.certificate}")),
        (
            one._replace(authority=theirs.authority),
            ("door.certificate {0.certificate}", "door.authority {0.authority}: "),
        ),
        (ours.keys("n1", usage=only_server), ("{0.authority}: unsuitable certificate",)),
        (ours.keys("n1", days=-2), ("door.certificate {0.certificate}", " UTC")),
        (ours.keys(""), ("door.certificate {0.certificate}", "holdfast:node:NAME")),
        (ours.keys("../x"), ("door.certificate {0.certificate}", "holdfast:node:NAME")),
    ):
        with pytest.raises(UserCertificateError) as caught:
            organisation_certificates.check_certificates(keys)
        assert all(fact.format(keys) in str(caught.value) for fact in facts)


def test_a_certificate_that_expires_while_the_job_runs_shuts_nobody_out(ours: Organisation) -> None:
    """The very links of a job, long after: only the start looks at the clock."""
    late = ours.keys("n1", days=-400)
    caller, called = mutual_tls.client_tls(late, controller=False), mutual_tls.server_tls(late, strangers=False)
    assert mutual_tls.certificate_node(organisation_certificates._shake_hands(caller, called)) == "n1"
    for context in (caller, called):
        context.verify_flags &= ~mutual_tls.NO_CHECK_TIME
    with pytest.raises(OSError, match="expired"):
        organisation_certificates._shake_hands(caller, called)
