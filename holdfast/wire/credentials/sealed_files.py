"""Files sealed with the job's secret, so that they can lie where others may read: whoever lacks the secret can neither
read nor change them."""

import os

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from holdfast.core.decoding import from_msgpack

_NONCE_BYTES = 12
_PURPOSE = b"holdfast sealed files 1"


class SealError(Exception):
    """The bytes were not sealed with this secret, or were changed since."""


def seal_files(files: dict[str, bytes], secret: str, run_id: str) -> bytes:
    """Encrypt files (AES-256-GCM, with a key that follows from the secret), bound to this run."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + _cipher(secret).encrypt(nonce, msgspec.msgpack.encode(files), run_id.encode())


def unseal_files(sealed: bytes, secret: str, run_id: str) -> dict[str, bytes]:
    """Return the files; SealError if the secret is another one, or the bytes were changed."""
    try:
        content = _cipher(secret).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], run_id.encode())
        return from_msgpack(content, dict[str, bytes])
    except (InvalidTag, ValueError, msgspec.DecodeError):
        raise SealError from None


def _cipher(secret: str) -> AESGCM:
    # The secret has 128 random bits, so no slow derivation is needed against guessing.
    return AESGCM(HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_PURPOSE).derive(secret.encode()))
