"""Enrols this host with a job's controller; sends nothing secret until the controller has proved itself."""

import http.client
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.terminal_sanitizer import strip_controls
from holdfast.decoding import from_json
from holdfast.model.job_and_seats import HostIdentity
from holdfast.wire.credentials import certificate_authority, enrolment, enrolment_token, job_secret_proof, mutual_tls
from holdfast.wire.credentials.enrolment import CertifiedNode, Challenge, EnrolmentGrant, EnrolmentRequest
from holdfast.wire.credentials.mutual_tls import KeyFiles

_WAIT_S = 10.0
_MOST_BYTES = 1 << 16
_LATER = (http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.SERVICE_UNAVAILABLE)
_ANOTHER = "it belongs to another job or has expired; make a new one on the controller's host with holdfast token node"


class EnrolmentError(Exception):
    """Says in one sentence why this host could not join the job."""


class EnrolmentRefusedError(EnrolmentError):
    """The controller answered and refused this host; `status` is the HTTP status of its answer."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


class UnknownTokenError(EnrolmentError):
    """The controller could not prove that it knows this host's token, so it may be the controller of another job."""


class NotControllerError(EnrolmentError):
    """The process that answers is not a controller."""


class NoAnswerError(EnrolmentError):
    """The controller does not answer now, but may do so later."""


class LinkClosedError(NoAnswerError):
    """The controller closed the link after this host showed its certificate. If this repeats, it rejects the
    certificate."""


class TlsConnection:
    """HTTP over one TLS link to a controller."""

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext) -> None:
        """Connect. Raise EnrolmentError if that fails. `context` says how the controller must prove its identity."""
        self.where, self._shows = f"{address[0]}:{address[1]}", context.verify_mode is not ssl.CERT_NONE
        try:
            bare = socket.create_connection(address, timeout=_WAIT_S)
        except OSError as e:
            raise NoAnswerError(f"the controller at {self.where} does not answer: {e}") from None
        try:
            self._link = context.wrap_socket(bare, server_hostname=mutual_tls.CONTROLLER)
        except OSError as e:
            bare.close()
            raise self._no_answer(e) from None
        self._http = http.client.HTTPConnection(mutual_tls.CONTROLLER)
        self._http.sock = self._link

    def peer_certificate(self) -> bytes:
        return self._link.getpeercert(binary_form=True) or b""

    def proved_certificate(self) -> dict[str, Any]:
        """Return the certificate by which the controller has proved itself."""
        return self._link.getpeercert() or {}

    def _no_answer(self, e: OSError) -> EnrolmentError:
        if isinstance(e, ssl.SSLCertVerificationError):
            return EnrolmentError(f"the server at {self.where} is no controller by door.authority: {e.verify_message}")
        if isinstance(e, ssl.SSLError):
            return NotControllerError(f"the server at {self.where} is not holdfast")
        return NoAnswerError(f"the controller at {self.where} does not answer: {e}")

    def send_request(self, method: str, path: str, kind: type[Any], body: bytes | None = None) -> Any:
        try:
            self._http.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = self._http.getresponse()
            content = answer.read(_MOST_BYTES)
        except OSError as e:
            if self._shows and isinstance(e, ConnectionError | ssl.SSLError):
                why = f"the controller at {self.where} rejects door.certificate"
                raise LinkClosedError(why) from None
            raise self._no_answer(e) from None
        except http.client.HTTPException:
            raise NotControllerError(f"the server at {self.where} is not holdfast") from None
        if answer.status in _LATER:
            raise NoAnswerError(f"the controller at {self.where} is busy: {_refusal_text(content, answer.status)}")
        if answer.status != 200:
            why = f"the controller at {self.where} refused: {_refusal_text(content, answer.status)}"
            raise EnrolmentRefusedError(why, answer.status)
        try:
            return from_json(content, kind)
        except msgspec.DecodeError:
            raise NotControllerError(f"the server at {self.where} is not holdfast") from None

    def close(self) -> None:
        self._http.close()
        self._link.close()


class EnrolmentClient:
    def __init__(self, address: tuple[str, int], token: str) -> None:
        """Connect, and let the controller prove that it knows the token. Raise EnrolmentError if it does not."""
        self._own = enrolment_token.parse_token(token)
        self._token = self._own.secret if self._own else token
        self._line = TlsConnection(address, mutual_tls.unproved_tls())
        self._certificate = self._line.peer_certificate()
        try:
            self._prove_controller()
        except EnrolmentError:
            self.close()
            raise

    def _prove_controller(self) -> None:
        mine = os.urandom(job_secret_proof.NONCE_BYTES).hex()
        which = f"&token={self._own.id}" if self._own else ""
        found: Challenge = self._line.send_request("GET", f"{enrolment.PATH}?nonce={mine}{which}", Challenge)
        self._nonces = (mine, found.nonce)
        wanted = enrolment.controller_proof(self._token, self._nonces, self._certificate)
        if not job_secret_proof.is_equal(wanted, found.proof):
            raise UnknownTokenError(
                f"the controller at {self._line.where} does not know this host's token, so this host sent it nothing; "
                + (_ANOTHER if self._own else "set HOLDFAST_TOKEN to the same value on every host")
            )

    def enrol_node(self, name: str, folder: Path, run_id: str = "", identity: HostIdentity | None = None) -> KeyFiles:
        """Make a key for this node and let the controller sign its certificate; the key never leaves this host."""
        key = certificate_authority.make_key()
        request = certificate_authority.request_pem(key).decode()
        parts = enrolment.node_proof_parts(name, self._nonces, request, self._certificate)
        shown = job_secret_proof.make_proof(self._token, "node", *parts)
        body = EnrolmentRequest(
            name=name,
            nonces=self._nonces,
            request=request,
            proof=shown,
            run_id=run_id,
            host=socket.gethostname(),
            identity=identity or HostIdentity(),
        )
        found = self._line.send_request("POST", enrolment.PATH, EnrolmentGrant, msgspec.json.encode(body))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keys = KeyFiles.in_folder(folder)
        contents = (certificate_authority.key_pem(key), found.certificate.encode(), found.authority.encode())
        for path, content in zip(keys, contents, strict=True):
            mutual_tls.write_secret(path, content)
        return keys

    def close(self) -> None:
        self._line.close()


def introduce_host(address: tuple[str, int], keys: KeyFiles, run_id: str) -> CertifiedNode:
    """Ask the controller whether it accepts this host by its certificate from the user's own authority.

    `run_id` is the expected job, or "" for any. Raise EnrolmentError if the host is refused or the job is another one.
    """
    line = TlsConnection(address, mutual_tls.client_tls(keys, controller=True))
    try:
        run = mutual_tls.certificate_run(line.proved_certificate())
        if run and run_id and run != run_id:
            raise EnrolmentError(
                f"the certificate of the controller at {line.where} is for the run {run}, not {run_id}"
            )
        known: CertifiedNode = line.send_request("GET", enrolment.PATH, CertifiedNode)
        if run_id and known.run_id != run_id:
            raise EnrolmentError(
                f"the controller at {line.where} refused: it runs the job {known.run_id}, not {run_id}"
            )
        return known
    finally:
        line.close()


def _refusal_text(content: bytes, status: int) -> str:
    try:
        said = str(from_json(content, dict[str, object])["error"])  # by who may not have proved itself yet
        return " ".join(strip_controls(said).split())[:1000]
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"HTTP {status}"
