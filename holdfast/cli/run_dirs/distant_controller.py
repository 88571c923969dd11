"""A controller on any host, asked at its port with a token, also through a forwarded port."""

import argparse
import getpass
import http.client
import ipaddress
import socket
import ssl
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.core.terminal_sanitizer import plain_line
from holdfast.decoding import from_json
from holdfast.wire.agent_messages import TOKEN_HEADER
from holdfast.wire.controller_request import ControllerNotRunning, NotAController, RequestRefused
from holdfast.wire.credentials import mutual_tls

_ANSWER_S = 15.0
_MOST_BYTES = 1 << 28


class DistantController:
    def __init__(self, address: str, token: str, authority: Path | None) -> None:
        """`authority` signed the controller's certificate; None: an authority that this host trusts anyway."""
        self._host, self._port, is_secure = _parse_address(address)
        self.name, self._token = urlsplit(address).netloc, token
        self._own: ssl.SSLContext | None = None  # checks a controller
        self._proxy: ssl.SSLContext | None = None  # checks whatever stands in front of one
        if is_secure:
            self._own, self._proxy = _make_contexts(authority)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a GET, or a POST if there is a body, and return the decoded JSON answer."""
        try:
            return from_json(self.fetch("GET" if body is None else "POST", path, body), object)
        except msgspec.DecodeError:
            raise NotAController(f"the server at {self.name} is not holdfast") from None

    def fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the raw answer. Raises ControllerNotRunning; RequestRefused says why a controller refused."""
        link = http.client.HTTPConnection(self._host, self._port)
        try:
            link.sock = self._connect()
            sent = msgspec.json.encode(body) if body is not None else None
            link.request(method, path, sent, {TOKEN_HEADER: self._token})
            answer = link.getresponse()
            content = answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException) as e:
            raise ControllerNotRunning(f"the controller at {self.name} does not answer: {e}") from None
        finally:
            link.close()
        if answer.status != http.HTTPStatus.OK:
            raise RequestRefused(_refusal_text(content, answer.status), answer.status)
        return content

    def _connect(self) -> socket.socket:
        """Connect and, with https, check who answers: a controller by its own name, wherever its port is forwarded to;
        else, as whatever stands in front of one, by the name in the address."""
        if self._own:
            try:
                return self._own.wrap_socket(self._dial(), server_hostname=mutual_tls.CONTROLLER)
            except ssl.SSLError:  # it has another name, or speaks an older TLS
                pass
        return self._proxy.wrap_socket(self._dial(), server_hostname=self._host) if self._proxy else self._dial()

    def _dial(self) -> socket.socket:
        return socket.create_connection((self._host, self._port), timeout=_ANSWER_S)


def _parse_address(address: str) -> tuple[str, int, bool]:
    """Return an address's host and port, and whether it is https. Raise UsageError if it cannot be called, or if the
    token would cross a network in the clear."""
    try:
        place = urlsplit(address)
        host, port, is_secure = place.hostname or "", place.port, place.scheme == "https"
        host.encode("idna")
    except ValueError:
        host, port, is_secure, place = "", None, False, urlsplit("")
    if not host or "@" in place.netloc or not place.netloc.isprintable() or " " in place.netloc:
        raise UsageError(f"{plain_line(address)} is no address of a controller; one looks like https://host0:29400")
    if not is_secure and not _is_loopback(host):
        raise UsageError(f"{address} would show your token to everybody on the way to {host}; give an https address")
    return host, port or (443 if is_secure else 80), is_secure


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _make_contexts(authority: Path | None) -> tuple[ssl.SSLContext | None, ssl.SSLContext]:
    """Return the TLS contexts that check a controller, as nodes do, and whatever stands in front of one."""
    if authority is None:
        return None, _make_proxy_tls(None)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    own.minimum_version = ssl.TLSVersion.TLSv1_3
    own.verify_flags |= mutual_tls.NO_CHECK_TIME
    try:
        own.load_verify_locations(authority)
        return own, _make_proxy_tls(authority)
    except (OSError, ssl.SSLError) as e:
        raise UsageError(f"{authority} cannot be used as an authority: {e}") from None


def _make_proxy_tls(authority: Path | None) -> ssl.SSLContext:
    tls = ssl.create_default_context(cafile=authority)
    tls.hostname_checks_common_name = False  # it is "holdfast" in the certificate of every node
    return tls


def add_address_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="your token for a controller's address")
    parser.add_argument("--cacert", type=Path, metavar="FILE", help="the authority of a controller's certificate")


def is_address(name: str | None) -> bool:
    return bool(name) and str(name).startswith(("http://", "https://"))


def open_address(address: str, args: argparse.Namespace) -> DistantController:
    """Return the controller at an address, with the token that `--token-file` or the terminal gives."""
    return DistantController(address, _read_token(args.token_file), args.cacert)


def _read_token(path: Path | None) -> str:
    if path is None and not sys.stdin.isatty():
        raise UsageError("give your token for this address with --token-file; holdfast token add makes one")
    try:
        token = (getpass.getpass("token: ") if path is None else path.read_text(encoding="utf-8")).strip()
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isascii() or not token.isprintable():
        raise UsageError(f"{path or 'what you typed'} is no token; holdfast token add makes one")
    return token


def _refusal_text(content: bytes, status: int) -> str:
    try:
        return str(from_json(content, dict[str, object])["error"])
    except (msgspec.DecodeError, KeyError):
        return f"HTTP {status}"
