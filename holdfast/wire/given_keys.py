"""Certificates of an organisation's own authority, in the place of those that a job makes: what is good enough.

They are looked at once, at the start, and copied into the run directory: what becomes of the files later, or of their
dates, shuts nobody out of a job that runs.
"""

import datetime
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from holdfast.wire import enrolment, identity
from holdfast.wire.identity import CONTROLLER, NODE, Keys, put_secret

_ROUNDS = 8  # that a handshake takes at most


class GivenError(Exception):
    """One sentence: which file is wrong, and how."""


class Given(NamedTuple):
    """What one host was given."""

    keys: Keys
    node: str  # the name that the certificate is for
    run: str  # the run that it is for; "": any
    leads: bool  # whether it is for a controller, too

    def copy(self, folder: Path) -> Keys:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        copies = Keys.in_folder(folder)
        for path, copy in zip(self.keys, copies, strict=True):
            put_secret(copy, path.read_bytes())
        return copies


def look(keys: Keys) -> Given:
    """GivenError, unless both sides of a link could prove themselves by these here and now."""
    _check_files(keys)
    shown = _shown(keys)
    node = identity.node_of(shown)
    if not enrolment.NAME.fullmatch(node):
        raise GivenError(
            f"door.certificate {keys.certificate} names no node: it needs the URI {NODE}NAME as an alternative name"
        )
    names = shown.get("subjectAltName", ())
    return Given(keys, node, identity.run_of(shown), ("DNS", CONTROLLER) in names)


def _check_files(keys: Keys) -> None:
    certificate = _certificates("certificate", keys.certificate)[0]
    _certificates("authority", keys.authority)
    try:
        serialization.load_pem_private_key(_read("key", keys.key), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a passphrase
        raise GivenError(f"door.key {keys.key} is no private key in PEM without a passphrase") from None
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        raise GivenError(f"door.certificate {keys.certificate} expired at {_said(certificate.not_valid_after_utc)}")
    if now < certificate.not_valid_before_utc:
        since = _said(certificate.not_valid_before_utc)
        raise GivenError(f"door.certificate {keys.certificate} is not valid before {since}; look at this host's clock")


def _read(which: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise GivenError(f"door.{which} {path} cannot be read: {e.strerror}") from None


def _certificates(which: str, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(which, path))
    except ValueError:
        raise GivenError(f"door.{which} {path} is no certificate in PEM") from None


def _said(at: datetime.datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _shown(keys: Keys) -> dict[str, Any]:
    """The certificate as the other side of a link sees it: we call ourselves, and both sides look at the clock."""
    try:
        caller, called = identity.calling(keys, controller=False), identity.accepting(keys, strangers=False)
        for context in (caller, called):
            context.verify_flags &= ~identity.NO_CHECK_TIME
        return _handshake(caller, called)
    except ssl.SSLCertVerificationError as e:
        raise GivenError(
            f"door.certificate {keys.certificate} is not good by door.authority {keys.authority}: {e.verify_message}"
        ) from None
    except ssl.SSLError as e:
        if e.reason == "KEY_VALUES_MISMATCH":
            raise GivenError(f"door.key {keys.key} is not the key of door.certificate {keys.certificate}") from None
        raise GivenError(f"door.certificate {keys.certificate} cannot be used: {e.reason}") from None


def _handshake(caller: ssl.SSLContext, called: ssl.SSLContext) -> dict[str, Any]:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [caller.wrap_bio(back, there), called.wrap_bio(there, back, server_side=True)]
    for turn in range(_ROUNDS):
        try:
            sides[turn % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
    return sides[1].getpeercert() or {}
