"""Checks of certificates that the user's own authority signed and that a job uses instead of its own.

They are checked once, at the start, and copied into the run directory: if the files change or expire later, nobody is
shut out of a running job.
"""

import datetime
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from holdfast.wire.credentials import enrolment, mutual_tls
from holdfast.wire.credentials.mutual_tls import CONTROLLER, NODE, KeyFiles, write_secret

_ROUNDS = 8  # that a handshake takes at most


class UserCertificateError(Exception):
    """A certificate file cannot be used: one sentence says which file, and why."""


class UserCertificates(NamedTuple):
    """The certificate files of one host, with the node and run that the certificate names."""

    keys: KeyFiles
    node: str  # the name that the certificate is for
    run: str  # the run that it is for; "": any
    leads: bool  # whether it is for a controller, too

    def copy_to(self, folder: Path) -> KeyFiles:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        copies = KeyFiles.in_folder(folder)
        for path, copy in zip(self.keys, copies, strict=True):
            write_secret(copy, path.read_bytes())
        return copies


def check_certificates(keys: KeyFiles) -> UserCertificates:
    """Check that these files work now on both sides of a link; raises UserCertificateError if they do not."""
    _check_files(keys)
    shown = _shown_certificate(keys)
    node = mutual_tls.certificate_node(shown)
    if not enrolment.NAME.fullmatch(node):
        raise UserCertificateError(
            f"door.certificate {keys.certificate} names no node: it needs the URI {NODE}NAME as an alternative name"
        )
    names = shown.get("subjectAltName", ())
    return UserCertificates(keys, node, mutual_tls.certificate_run(shown), ("DNS", CONTROLLER) in names)


def _check_files(keys: KeyFiles) -> None:
    certificate = _load_certificates("certificate", keys.certificate)[0]
    _load_certificates("authority", keys.authority)
    try:
        serialization.load_pem_private_key(_read_file("key", keys.key), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a passphrase
        raise UserCertificateError(f"door.key {keys.key} is not a PEM private key without a passphrase") from None
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        raise UserCertificateError(
            f"door.certificate {keys.certificate} expired at {_time_text(certificate.not_valid_after_utc)}"
        )
    if now < certificate.not_valid_before_utc:
        since = _time_text(certificate.not_valid_before_utc)
        raise UserCertificateError(
            f"door.certificate {keys.certificate} is not valid before {since}; check this host's clock"
        )


def _read_file(which: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise UserCertificateError(f"door.{which} {path} cannot be read: {e.strerror}") from None


def _load_certificates(which: str, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read_file(which, path))
    except ValueError:
        raise UserCertificateError(f"door.{which} {path} is not a PEM certificate") from None


def _time_text(at: datetime.datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _shown_certificate(keys: KeyFiles) -> dict[str, Any]:
    """Return the certificate as a peer sees it, from a test handshake that also checks the validity dates."""
    try:
        caller, called = mutual_tls.client_tls(keys, controller=False), mutual_tls.server_tls(keys, strangers=False)
        for context in (caller, called):
            context.verify_flags &= ~mutual_tls.NO_CHECK_TIME
        return _shake_hands(caller, called)
    except ssl.SSLCertVerificationError as e:
        raise UserCertificateError(
            f"door.certificate {keys.certificate} is not trusted by door.authority {keys.authority}: {e.verify_message}"
        ) from None
    except ssl.SSLError as e:
        if e.reason == "KEY_VALUES_MISMATCH":
            raise UserCertificateError(
                f"door.key {keys.key} is not the key of door.certificate {keys.certificate}"
            ) from None
        raise UserCertificateError(f"door.certificate {keys.certificate} cannot be used: {e.reason}") from None


def _shake_hands(caller: ssl.SSLContext, called: ssl.SSLContext) -> dict[str, Any]:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [caller.wrap_bio(back, there), called.wrap_bio(there, back, server_side=True)]
    for turn in range(_ROUNDS):
        try:
            sides[turn % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
    return sides[1].getpeercert() or {}
