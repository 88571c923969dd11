"""Links on which both sides prove themselves: TLS 1.3 with certificates of the job's or the user's authority.

No other authority counts, and expiry dates do not count: a certificate is good until the controller revokes its serial.
So nobody is shut out while the controller is away or a clock is wrong. Certificates of the user's authority are in
organisation_certificates.py.
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
    """The key, certificate and authority files by which one side of a link proves itself and checks the other."""

    key: Path
    certificate: Path
    authority: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "KeyFiles":
        return cls(folder / "key.pem", folder / "certificate.pem", folder / "authority.pem")


def write_secret(path: Path, content: bytes, durable: bool = False) -> None:
    """Write a file that only its owner can read; see `write_file_of_mode`."""
    write_file_of_mode(path, content, 0o600, durable=durable)


def write_file_of_mode(path: Path, content: bytes, mode: int, *, durable: bool) -> None:
    """Write a file of this mode, whole or not at all; never writes through a symbolic link. With `durable`, the
    content is on disk when this returns."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(fd, mode)  # whatever the umask says
        if durable:
            os.fsync(fd)
    part.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


def write_new_secret(path: Path, content: bytes) -> None:
    """Write a secret unless the file exists; if several processes try at once, the first one's content stays."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    write_secret(part, content)
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    finally:
        part.unlink()


def server_tls(keys: KeyFiles, strangers: bool) -> ssl.SSLContext:
    """Return the TLS context of a server. With `strangers`, callers without a certificate are accepted too."""
    context = _make_tls(ssl.PROTOCOL_TLS_SERVER, keys)
    context.verify_mode = ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED
    context.num_tickets = 0  # nobody calls twice by one proof
    return context


def client_tls(keys: KeyFiles, controller: bool) -> ssl.SSLContext:
    """Return the TLS context of a caller; if it calls the controller, the controller's name is checked too."""
    context = _make_tls(ssl.PROTOCOL_TLS_CLIENT, keys)
    context.check_hostname = controller
    return context


def unproved_tls() -> ssl.SSLContext:
    """Return a TLS context for a caller without a certificate; the server must prove itself by other means."""
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
    """Return the node that a certificate names, or "" if it is the controller's or there is no certificate."""
    return _find_uri(certificate, NODE)


def certificate_run(certificate: dict[str, Any] | None) -> str:
    """Return the run that a certificate is limited to, or "" if it is good for any run."""
    return _find_uri(certificate, RUN)


def _find_uri(certificate: dict[str, Any] | None, prefix: str) -> str:
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and value.startswith(prefix):
            return urllib.parse.unquote(value.removeprefix(prefix))
    return ""


def certificate_serial(certificate: dict[str, Any] | None) -> str:
    return str((certificate or {}).get("serialNumber", ""))
