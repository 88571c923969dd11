"""Proves and seals what a run keeps in a database: who lacks the job's secret can neither read nor change it."""

import hashlib
import hmac
from collections.abc import Mapping

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

TAG_BYTES = 16  # the beginning of what is sealed; it follows from the key, the name and all of the content
_PROOF_BYTES = 32
_PURPOSE = b"holdfast journal 1 "


class SealError(Exception):
    """The bytes were not sealed with this secret for this run and name, or were changed since."""


class JournalKey:
    """The keys of one run, which follow from the job's secret."""

    def __init__(self, secret: str, run_id: str) -> None:
        # The secret has 128 random bits, so no slow derivation is needed against guessing.
        made = HKDF(algorithm=hashes.SHA256(), length=96, salt=None, info=_PURPOSE + run_id.encode())
        keys = made.derive(secret.encode())
        self._proof, self._cipher = keys[:_PROOF_BYTES], AESSIV(keys[_PROOF_BYTES:])

    def make_proof(self, seq: int, chain: bytes, tags: Mapping[str, bytes]) -> bytes:
        """Return what only this key can make of the newest entry's number and checksum, and of the tags of all notes
        by name. The checksum covers all entries, so the proof does, too."""
        told = msgspec.msgpack.encode((seq, chain, sorted(tags.items())))
        return hashlib.blake2b(told, key=self._proof, digest_size=_PROOF_BYTES).digest()

    def is_proof(self, proof: bytes, seq: int, chain: bytes, tags: Mapping[str, bytes]) -> bool:
        return hmac.compare_digest(proof, self.make_proof(seq, chain, tags))

    def seal(self, name: str, content: bytes) -> bytes:
        return self._cipher.encrypt(content, [name.encode()])

    def unseal(self, name: str, sealed: bytes) -> bytes:
        try:
            return self._cipher.decrypt(sealed, [name.encode()])
        except InvalidTag:
            raise SealError from None
