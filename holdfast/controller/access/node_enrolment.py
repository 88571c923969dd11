"""The controller's side of enrolment: enrols hosts that know the job's secret or have a node token."""

import asyncio
import os
import ssl
import time
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web

from holdfast.controller.access.audit_log import AuditLog
from holdfast.controller.access.enrolment_tokens import NodeTokens
from holdfast.controller.access.node_certificate_serials import NodeCertificates
from holdfast.controller.blocked_hosts import HostAdmission
from holdfast.decoding import from_json
from holdfast.journal.journal_errors import JournalError
from holdfast.model.decider_events import Ready
from holdfast.wire.credentials import enrolment, job_secret_proof, mutual_tls
from holdfast.wire.credentials.enrolment import Challenge, EnrolmentGrant, EnrolmentRequest
from holdfast.wire.request_rates import RequestRates

if TYPE_CHECKING:
    from holdfast.wire.credentials.certificate_authority import CertificateAuthority

_OPEN_S = 30.0  # from the challenge to the answer
_A_SECOND, _AT_ONCE = 0.1, 20.0  # refusals with one token that get a line each


class _Open(NamedTuple):
    """A challenge that the node has not answered yet."""

    nonces: tuple[str, str]
    until: float
    token: str  # the id of a node's token; "": the job's secret is meant


_NONE = _Open(("", ""), 0.0, "")


class NodeEnrolment:
    def __init__(
        self,
        authority: "CertificateAuthority",
        token: str,
        run_id: str,
        *,
        audit: AuditLog,
        tokens: NodeTokens,
        certificates: NodeCertificates,
        admission: HostAdmission,
        announce: Callable[[Ready], None],
    ) -> None:
        """`announce` reports to the job that a node was refused because its host is blocked."""
        self._authority, self._token, self._run_id = authority, token, run_id
        self._audit, self._tokens, self._certificates = audit, tokens, certificates
        self._admission, self._announce = admission, announce
        self._rates = RequestRates(_A_SECOND, _AT_ONCE)
        self._certificate = ssl.PEM_cert_to_DER_cert(authority.keys.certificate.read_text())
        # By link, and gone with it: whoever asks for many fills nothing but the links that the porch lets him have.
        self._open: MutableMapping[asyncio.BaseTransport, _Open] = WeakKeyDictionary()
        certificates.take_recorded(authority.node_serials())

    def certificate_refusal(self, shown: dict[str, Any]) -> str:
        """Return why a node's certificate is no longer accepted; "" if it is. The job's authority has signed it."""
        node, serial = mutual_tls.certificate_node(shown), mutual_tls.certificate_serial(shown)
        if self._certificates.is_valid(node, serial):
            return ""
        why = f"the certificate of {node} is no longer valid"
        if self._certificates.may_recognize(node):
            try:
                self._authority.record_serial(node, serial)
            except OSError as e:
                return f"the controller cannot record the node: {e.strerror}"
            self._certificates.recognize_node(node, serial)
            return ""
        self._certificates.tell_refusal(node, why)
        return why

    async def challenge_route(self, request: web.Request) -> web.Response:
        mine, token = request.query.get("nonce", ""), request.query.get("token", "")
        if len(mine) != 2 * job_secret_proof.NONCE_BYTES:
            return _error_response(400, f"send a nonce of {2 * job_secret_proof.NONCE_BYTES} characters")
        if request.transport is None or request.transport in self._open:
            return _error_response(400, "this connection has already had its challenge; connect again for another")
        nonces = (mine, os.urandom(job_secret_proof.NONCE_BYTES).hex())
        self._open[request.transport] = _Open(nonces, time.monotonic() + _OPEN_S, token)
        shown = enrolment.controller_proof(self._secret_of(token), nonces, self._certificate)
        return _json_response(Challenge(nonce=nonces[1], proof=shown))

    def _secret_of(self, token: str) -> str:
        """Return a token's secret. For an unknown token return a random one, so that no caller learns which tokens
        exist."""
        known = self._tokens.secret_of(token) if token else self._token
        return known or os.urandom(job_secret_proof.NONCE_BYTES).hex()

    async def enrol_route(self, request: web.Request) -> web.Response:
        try:
            asked = from_json(await request.read(), EnrolmentRequest)
        except msgspec.DecodeError as e:
            return _error_response(400, f"this is not a request of this version of holdfast: {e}")
        found = self._answered(request.transport)
        origin = request.remote or ""
        if why := self._why_unproved(asked, found):
            self._audit.record_refusal(origin, f"POST {enrolment.PATH}", why)
            return _error_response(403, why)
        await self._admission.read_list(asked.identity)  # only for who has proved himself, and before a token is judged
        try:
            signed = self._sign_certificate(asked, found.token)
        except _RefusedError as e:
            told = self._audit_attempt(asked, found.token, origin, e.why)
            if told and e.status == enrolment.BLOCKED_STATUS:
                self._announce(Ready(node=asked.name, host=asked.host, nproc=0, identity=asked.identity, blocked=e.why))
            return _error_response(e.status, e.why)
        self._audit_attempt(asked, found.token, origin)
        return _json_response(EnrolmentGrant(certificate=signed, authority=self._authority.keys.authority.read_text()))

    def _answered(self, link: asyncio.BaseTransport | None) -> _Open:
        """Return the link's challenge and mark it as answered; a link gets only one challenge."""
        found = self._open.get(link, _NONE) if link else _NONE
        if link:
            self._open[link] = _NONE
        return found

    def _why_unproved(self, asked: EnrolmentRequest, found: _Open) -> str:
        if found.until < time.monotonic() or asked.nonces != found.nonces:
            return "this challenge has expired or is not of this connection; ask for another"
        parts = enrolment.node_proof_parts(asked.name, asked.nonces, asked.request, self._certificate)
        if not job_secret_proof.is_equal(
            job_secret_proof.make_proof(self._secret_of(found.token), "node", *parts), asked.proof
        ):
            return "the secret or token is not one of this job"
        return ""

    def _sign_certificate(self, asked: EnrolmentRequest, token: str) -> str:
        """Sign a node's certificate, mark its token as used, and register the node. Raises _RefusedError."""
        if not enrolment.NAME.fullmatch(asked.name):
            raise _RefusedError(400, enrolment.NAMES)
        if token and (why := self._tokens.why_unusable(token, asked.name)):
            raise _RefusedError(403, why)
        if asked.run_id and asked.run_id != self._run_id:
            raise _RefusedError(409, f"this controller runs job {self._run_id}, not {asked.run_id}")
        if self._certificates.serial_of(asked.name) is not None:
            raise _RefusedError(409, f"this job already has a node {asked.name}; give this one another name")
        if blocked := self._admission.refusal_of(asked.host, asked.identity):  # its token is for when that is lifted
            raise _RefusedError(enrolment.BLOCKED_STATUS, blocked)
        try:
            signed = self._authority.sign_node(asked.name, asked.request.encode())
        except ValueError as e:
            raise _RefusedError(400, f"cannot sign the key: {e}") from None
        try:
            if token:
                self._tokens.use_token(token, asked.name)
            serial = self._authority.register_node(asked.name, signed)
            self._tokens.publish()  # before the node has it: another host's controller believes no serial it lacks
        except OSError as e:
            raise _RefusedError(503, f"the controller cannot record the node: {e.strerror}") from None
        except JournalError as e:
            raise _RefusedError(503, f"the controller cannot record the node: {e}") from None
        self._certificates.add_serials({asked.name: serial})
        return signed.decode()

    def _audit_attempt(self, asked: EnrolmentRequest, token: str, origin: str, refused: str = "") -> bool:
        """Write an attempt to enrol to the audit log. Return False for a refusal above its token's rate limit: it gets
        a short line at most, so that refusals cannot fill the disk."""
        if refused and not self._rates.may_call(token):
            self._audit.record_refusal(origin, f"POST {enrolment.PATH}", refused)
            return False
        who = f"node's token {token}" if token else "the job's secret"
        self._audit.record_order(who, origin, {"enrol": asked.name[:200]}, refused)
        return True


class _RefusedError(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


def _json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error_response(status: int, sentence: str) -> web.Response:
    """Return an error response that closes the connection, so that a bad caller must reconnect for every attempt."""
    answer = _json_response({"error": sentence}, status)
    answer.force_close()
    return answer
