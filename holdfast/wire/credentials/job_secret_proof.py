"""The job's secret, which every host has: checks of its strength, and how both sides prove that they know it.

The secret itself is never sent. First the controller proves that it knows the secret, and then the node does. Each
proof is a code over both sides' random numbers and the certificate of this link. A man in the middle has another
certificate, so no proof that he passes on is valid.
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
EMPTY = f"is empty, so anyone could join; {_HOW}"
UNPRINTABLE = f"contains characters other than printable ASCII; {_HOW}"
GUESSABLE = f"is too short or too regular and needs at least {_BITS} random bits; {_HOW}"


def secret_fault(token: str) -> str:
    """Return why a secret is too weak, as a clause such as "is empty"; empty if it is strong enough."""
    if not token:
        return EMPTY
    if not token.isascii() or not token.isprintable() or " " in token:
        return UNPRINTABLE
    size = next(len({*kind}) for kind in _KINDS if {*token} <= {*kind})
    bits = len(token) * math.log2(size)
    if bits < _BITS or len(set(token)) < _DIFFERENT or token in (token + token)[1:-1]:
        return GUESSABLE
    return ""


def make_proof(token: str, who: str, *parts: bytes) -> str:
    """Return an HMAC of these parts, keyed by the secret. `who` names the side: each side's proof differs."""
    said = hashlib.sha256()
    for part in (who.encode(), *parts):
        said.update(len(part).to_bytes(8, "big") + part)
    return hmac.new(token.encode(), said.digest(), hashlib.sha256).hexdigest()


def is_equal(wanted: str, shown: str) -> bool:
    """Compare two strings in constant time, so that timing reveals nothing."""
    return hmac.compare_digest(wanted.encode(), shown.encode("utf-8", "replace"))
