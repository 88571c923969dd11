"""The job's secret, which every host is given: what is good enough, and how both sides prove that they know it.

It is never said. The controller proves first that it knows it, by a code over both sides' random numbers and over the
very certificate that this link is encrypted with, so that nobody can stand in between; then the node does.
"""

import hashlib
import hmac
import math
import string

NONCE_BYTES = 32
_BITS = 128
_DIFFERENT = 8  # characters
_KINDS = (  # what characters may be drawn from; each of a token's is worth the less, the fewer these are
    string.digits,
    string.digits + "abcdef",
    string.digits + "ABCDEF",
    string.digits + string.ascii_lowercase,
    string.digits + string.ascii_letters,
    string.printable,
)
_HOW = "make one with: python3 -c 'import secrets; print(secrets.token_hex(16))'"


def secret_fault(token: str) -> str:
    """Why a secret is not good enough, in words that go after its name; empty if it is."""
    if not token:
        return f"is empty, and everybody could join; {_HOW}"
    if not token.isascii() or not token.isprintable() or " " in token:
        return f"has characters other than printable ASCII; {_HOW}"
    size = next(len({*kind}) for kind in _KINDS if {*token} <= {*kind})
    bits = len(token) * math.log2(size)
    if bits < _BITS or len(set(token)) < _DIFFERENT or token in (token + token)[1:-1]:
        return f"is too short or too regular: at least {_BITS} random bits are needed; {_HOW}"
    return ""


def make_proof(token: str, who: str, *parts: bytes) -> str:
    """Who knows the secret can make it, and for these parts alone; `who`: so that one side's is not the other's."""
    said = hashlib.sha256()
    for part in (who.encode(), *parts):
        said.update(len(part).to_bytes(8, "big") + part)
    return hmac.new(token.encode(), said.digest(), hashlib.sha256).hexdigest()


def is_equal(wanted: str, shown: str) -> bool:
    """Compared in a time that tells nothing."""
    return hmac.compare_digest(wanted.encode(), shown.encode("utf-8", "replace"))
