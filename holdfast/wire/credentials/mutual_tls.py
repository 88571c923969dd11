"""Links that both sides prove: TLS 1.3 with certificates of the job's own authority, or of the user's (given_keys.py).

Nobody else's word counts, and no clock: a certificate is good until its serial is no longer among those that the
controller names, so that nobody is shut out while the controller is away or a clock is wrong.
"""

import os
import ssl
import urllib.parse
from pathlib import Path
from typing import Any, NamedTuple

CONTROLLER = "controller.holdfast"  # the name that the controller's certificate is for, wherever it listens
NODE = "holdfast:node:"  # goes before a node's name, as an alternative name of its certificate
SIGNING = "authority.key"  # the file of a job that has made its own authority
RUN = "holdfast:run:"  # the same before the id of the one run that a certificate of the user's is for
NO_CHECK_TIME = 0x200000  # X509_V_FLAGNO_CHECK_TIME, which the ssl module has no name for


class KeyFiles(NamedTuple):
    """Files by which one side of a link proves who it is, and knows the other."""

    key: Path
    certificate: Path
    authority: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "KeyFiles":
        return cls(folder / "key.pem", folder / "certificate.pem", folder / "authority.pem")


def write_secret(path: Path, content: bytes, durable: bool = False) -> None:
    """For its owner alone, whole or not at all, and never through a link that somebody left there.

    `durable`: it is on disk when this returns, whatever becomes of the machine.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        if durable:
            os.fsync(fd)
    part.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


def write_new_secret(path: Path, content: bytes) -> None:
    """The same, unless there is one already: of several at once the first one's stays."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    write_secret(part, content)
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()


def server_tls(keys: KeyFiles, strangers: bool) -> ssl.SSLContext:
    """For the side that is called; `strangers` may come without a certificate, as who enrols, or has a token."""
    context = _make_tls(ssl.PROTOCOL_TLS_SERVER, keys)
    context.verify_mode = ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED
    context.num_tickets = 0  # nobody calls twice by one proof
    return context


def client_tls(keys: KeyFiles, controller: bool) -> ssl.SSLContext:
    """For the side that calls: the controller by its name, or a node, whose serial is to be looked at."""
    context = _make_tls(ssl.PROTOCOL_TLS_CLIENT, keys)
    context.check_hostname = controller
    return context


def unproved_tls() -> ssl.SSLContext:
    """For who has no certificate yet: the other side proves itself by other means."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _make_tls(protocol: int, keys: KeyFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(keys.certificate, keys.key)
    context.load_verify_locations(keys.authority)
    context.verify_flags |= NO_CHECK_TIME
    return context


def certificate_node(certificate: dict[str, Any] | None) -> str:
    """Whose certificate this is, as the ssl module shows it; "" for the controller's, and where there is none."""
    return _find_uri(certificate, NODE)


def certificate_run(certificate: dict[str, Any] | None) -> str:
    """The run that it is for; "" where it is for any, as those of a job's own authority are."""
    return _find_uri(certificate, RUN)


def _find_uri(certificate: dict[str, Any] | None, prefix: str) -> str:
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and value.startswith(prefix):
            return urllib.parse.unquote(value.removeprefix(prefix))
    return ""


def certificate_serial(certificate: dict[str, Any] | None) -> str:
    return str((certificate or {}).get("serialNumber", ""))
