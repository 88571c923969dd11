"""How a host becomes a node of a job: both sides prove that they know a secret, then the controller signs a key.

The secret is the job's own, or belongs to a token made for this node alone (enrolment_token.py). In the second
case the node sends the token's id.

node        GET  /enrol?nonce=N1[&token=ID]            over TLS, before either side has proved anything
controller  N2, and its proof over N1, N2 and its certificate
node        POST /enrol  its name, the request to sign its key, its proof over all of these; its host's identity
controller  the node's certificate, and the authority's

Both requests use one connection, so that the certificate is the same."""

import hashlib
import re
from typing import Annotated

import msgspec

from holdfast.model.job_and_seats import HostIdentity
from holdfast.wire.credentials import job_secret_proof

PATH = "/enrol"
NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)  # other alphabets have letters that look like these
BLOCKED_STATUS = 423  # HTTP status of an answer to a host that is on the list of blocked hosts
NAMES = "a node's name has 1 to 200 ASCII letters, digits, dots, dashes and underscores"


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's random number, and its proof that it knows the secret."""

    nonce: str
    proof: str


class EnrolmentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a node sends after the controller has proved itself: its name, its signing request and its own proof."""

    name: str
    nonces: tuple[str, str]  # the node's and the controller's
    request: str
    proof: str
    run_id: str = ""  # the job that is meant; "": whichever this is
    host: Annotated[str, msgspec.Meta(max_length=255)] = ""  # its name
    identity: HostIdentity = HostIdentity()


class EnrolmentGrant(msgspec.Struct, frozen=True, kw_only=True):
    certificate: str
    authority: str


class CertifiedNode(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a node that need not enrol, because it has a certificate of the user's own authority."""

    node: str
    run_id: str


def controller_proof(token: str, nonces: tuple[str, str], certificate: bytes) -> str:
    return job_secret_proof.make_proof(
        token, "controller", *(n.encode() for n in nonces), hashlib.sha256(certificate).digest()
    )


def node_proof_parts(name: str, nonces: tuple[str, str], request: str, certificate: bytes) -> tuple[bytes, ...]:
    """Return the values that a node's proof covers."""
    return (*(n.encode() for n in nonces), name.encode(), request.encode(), hashlib.sha256(certificate).digest())
