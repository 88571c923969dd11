"""Proves that a run's data in a database is unchanged, and encrypts notes and environments, with the job's secret.

Encryption is AES-SIV, so the same content under the same name always gives the same bytes. This lets a reader without
the secret rebuild a decider: the rebuilt and the written decisions hold the same encrypted values.
"""

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from holdfast.decoding import from_msgpack

TAG_BYTES = 16  # the beginning of what is encrypted; it follows from the key, the name and all of the content
_PROOF_BYTES = 32
ENCRYPTED = "holdfast-encrypted:"  # how the values of environments begin where they are not in the clear
_PURPOSE = b"holdfast journal 1 "
_ENV = "env"
_ENV_IN_MSGPACK = b"\xa3env"


class DecryptionError(Exception):
    """The bytes were not encrypted with this secret for this run and name, or were changed since."""


class JournalKey:
    """The keys of one run, derived from the job's secret."""

    def __init__(self, secret: str, run_id: str) -> None:
        # The secret has 128 random bits, so no slow derivation is needed against guessing.
        made = HKDF(algorithm=hashes.SHA256(), length=96, salt=None, info=_PURPOSE + run_id.encode())
        keys = made.derive(secret.encode())
        self._proof, self._cipher = keys[:_PROOF_BYTES], AESSIV(keys[_PROOF_BYTES:])

    def make_proof(self, seq: int, chain: bytes, tags: Mapping[str, bytes]) -> bytes:
        """Return the proof of a journal: a keyed hash of the number and the checksum of its newest entry, and of the
        tags of its notes. The checksum of the newest entry covers all entries, so the proof covers them as well."""
        told = msgspec.msgpack.encode((seq, chain, sorted(tags.items())))
        return hashlib.blake2b(told, key=self._proof, digest_size=_PROOF_BYTES).digest()

    def is_proof(self, proof: bytes, seq: int, chain: bytes, tags: Mapping[str, bytes]) -> bool:
        return hmac.compare_digest(proof, self.make_proof(seq, chain, tags))

    def encrypt(self, name: str, content: bytes) -> bytes:
        return self._cipher.encrypt(content, [name.encode()])

    def decrypt(self, name: str, encrypted: bytes) -> bytes:
        try:
            return self._cipher.decrypt(encrypted, [name.encode()])
        except InvalidTag:
            raise DecryptionError from None

    def encrypt_env(self, encoded: bytes) -> bytes:
        """Return an encoded event or decision after encrypting the values in the environments of its releases."""
        return _change_env(encoded, self._encrypt_value)

    def decrypt_env(self, encoded: bytes) -> bytes:
        return _change_env(encoded, self._decrypt_value)

    def _encrypt_value(self, name: str, value: str) -> str:
        return ENCRYPTED + base64.b64encode(self.encrypt(f"{_ENV} {name}", value.encode())).decode()

    def _decrypt_value(self, name: str, value: str) -> str:
        if not value.startswith(ENCRYPTED):
            return value  # an older version wrote it
        return self.decrypt(f"{_ENV} {name}", base64.b64decode(value.removeprefix(ENCRYPTED))).decode()


def _change_env(encoded: bytes, change: Callable[[str, str], str]) -> bytes:
    if _ENV_IN_MSGPACK not in encoded:  # as in nearly all entries
        return encoded
    return msgspec.msgpack.encode(_with_env(from_msgpack(encoded, object), change))


def _with_env(tree: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(tree, list):
        return [_with_env(part, change) for part in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        name: {key: change(key, value) if isinstance(value, str) else value for key, value in part.items()}
        if name == _ENV and isinstance(part, dict)
        else _with_env(part, change)
        for name, part in tree.items()
    }
