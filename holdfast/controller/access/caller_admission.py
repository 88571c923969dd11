"""Decides who may connect to the controller, and what each caller may do.

On this host the kernel says whose process is at the other end of a unix socket. From other hosts, a node shows a
certificate of this job. A person shows a token, which has a name and a right. All other callers are refused.
"""

import asyncio
import enum
import hashlib
import ipaddress
import pwd
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from holdfast.linux import peer_credentials
from holdfast.wire.agent_messages import TOKEN_HEADER
from holdfast.wire.credentials import job_secret_proof, mutual_tls
from holdfast.wire.request_rates import RequestRates

_BEARER = "Bearer "
_A_SECOND, _AT_ONCE = 20.0, 200.0  # requests with one token
_NODE_A_SECOND, _NODE_AT_ONCE = 10.0, 100.0  # of one node: a link, and what it fetches for a release
ANY_NODE = "*"
UNSEEN_PROCESS = "a process of this host in another container"


class Right(enum.IntEnum):
    """What a caller may do; each right includes those before it."""

    VIEW = 1  # look at everything
    OPERATE = 2  # order what changes nothing but when and where the job runs
    ADMIN = 3  # bring code and environment


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A person or a node that has proved its identity."""

    name: str
    right: Right | None = None  # None: no person
    node: str = ""  # which node's agent it may be; ANY_NODE: any
    origin: str = ""  # where it called from
    pid: int = 0  # of a process of this host; 0: elsewhere, or in a container whose processes we do not see


ANYBODY = Caller(name="a node of this host", node=ANY_NODE)
CALLER: ContextVar[Caller] = ContextVar("caller")  # of the request that is being answered


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    why: str


Admit = Callable[[web.Request], Caller | Refusal]
Proved = Callable[[asyncio.BaseTransport | None], None]  # is told of links whose callers were let in


def admit_by_socket(request: web.Request) -> Caller | Refusal:
    """Admit a process on this host, with all rights, if its user is root or the job's user."""
    assert request.transport is not None
    peer = peer_credentials.read_peer(request.transport.get_extra_info("socket"))
    if not peer_credentials.may_order(peer):
        return Refusal(status=403, why="this job belongs to another user")
    origin = f"process {peer.pid} of this host" if peer.pid else UNSEEN_PROCESS
    return Caller(name=_user_name(peer.user), right=Right.ADMIN, node=ANY_NODE, origin=origin, pid=peer.pid)


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # as in a container, where a number is all there is
        return f"user {number}"


class UserToken(msgspec.Struct, frozen=True, kw_only=True):
    """A person's token as it is kept: name, right and digest."""

    name: str
    right: Right
    digest: str


def make_user_token(name: str, right: Right, token: str) -> UserToken:
    return UserToken(name=name, right=right, digest=token_digest(token))


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def _refuse_certificate(shown: dict[str, Any]) -> str:
    return "this job has no nodes on other hosts"


class PortAccess:
    """Admits people by token and nodes by certificate at the controller's port."""

    def __init__(
        self,
        badges: Callable[[], Collection[UserToken]],
        host: str,
        refusal: Callable[[dict[str, Any]], str] = _refuse_certificate,
    ) -> None:
        """`refusal` returns why a node's certificate is not accepted; empty if it is accepted."""
        self._badges = badges
        self._refusal = refusal
        self._host = host  # by whose name the port may be called, besides numbers
        self._rates = RequestRates(_A_SECOND, _AT_ONCE)
        self._node_rates = RequestRates(_NODE_A_SECOND, _NODE_AT_ONCE)

    def __call__(self, request: web.Request) -> Caller | Refusal:
        if stray := refuse_foreign_page(request, self._host):
            return stray
        shown = request.transport.get_extra_info("peercert") if request.transport else None
        origin = request.remote or ""
        if node := mutual_tls.certificate_node(shown):
            if why := self._refusal(shown or {}):
                return Refusal(status=403, why=why)
            if not self._node_rates.may_call(node):
                return Refusal(status=429, why="too many requests of this node; wait a few seconds")
            return Caller(name=node, node=node, origin=origin)
        wanted = token_digest(_bearer_token(request))
        for badge in self._badges():
            if job_secret_proof.is_equal(badge.digest, wanted):
                if not self._rates.may_call(badge.name):
                    return Refusal(status=429, why="too many requests with this token; wait a few seconds")
                return Caller(name=badge.name, right=badge.right, origin=origin)
        return Refusal(
            status=401, why=f"send a token in the header {TOKEN_HEADER}; the run's own is in the file RUN_DIR/token"
        )


def _bearer_token(request: web.Request) -> str:
    """Return the token in a request's headers. Tokens in the URL are not read: URLs end up in logs and histories."""
    said = request.headers.get("Authorization", "")
    return said.removeprefix(_BEARER) if said.startswith(_BEARER) else request.headers.get(TOKEN_HEADER, "")


def refuse_foreign_page(request: web.Request, host: str) -> Refusal | None:
    """Return a refusal if a web page of another site may have made a browser send this request; None if it may pass."""
    try:
        called = urlsplit(f"//{request.host}").hostname or ""
        page = urlsplit(request.headers.get("Origin", "")).netloc
    except ValueError:  # half an IPv6 address
        return Refusal(status=400, why="the header Host or Origin has no valid host")
    if called not in ("localhost", mutual_tls.CONTROLLER, host.lower()) and not _is_ip_address(called):
        return Refusal(status=403, why=f"{called} is no name of this port; call it by its IP address or as {host}")
    if "Origin" in request.headers and page != request.host:
        return Refusal(status=403, why="requests from web pages of other sites are refused")
    return None


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
