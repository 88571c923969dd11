"""Encrypts the environments of releases in a journal file, with a key in a file that is removed when the run has ended.

So the values of `update --env` are nowhere in the clear in a run directory that is kept. Readers without the key see
encrypted values, and rebuild the same decisions from them.
"""

import errno
import os
import re
import secrets
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.journal.journal_errors import JournalError, JournalFullError

if TYPE_CHECKING:
    from holdfast.journal.journal_key import JournalKey

ENCRYPTED = b"holdfast-encrypted:"  # as in journal_key.py, which takes long to import
_HAS_VALUES = re.compile(rb"\xa3env[^\x80]")  # an environment in msgpack, but not an empty one


class LocalEnvCipher:
    """Like a JournalKey for environments alone. The key is made and read when the first value comes: few jobs have
    one, and what encrypts takes long to import."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        """`path` is the key's. Whoever `writes` makes the key, and needs it to read: ranks get these values."""
        self._path, self._writes = path, writes

    def encrypt_env(self, encoded: bytes) -> bytes:
        if not _HAS_VALUES.search(encoded):
            return encoded
        if not self._path.exists():
            try:
                _write_key(self._path, secrets.token_hex(16).encode())
            except OSError as e:
                full = e.errno in (errno.ENOSPC, errno.EDQUOT)
                kind = JournalFullError if full else JournalError
                raise kind(f"{self._path} cannot be written: {e.strerror}") from None
        return self._key.encrypt_env(encoded)

    def decrypt_env(self, encoded: bytes) -> bytes:
        if ENCRYPTED not in encoded or (not self._writes and not self._path.exists()):
            return encoded
        from holdfast.journal.journal_key import DecryptionError

        try:
            return self._key.decrypt_env(encoded)
        except (DecryptionError, ValueError):
            if not self._writes:
                return encoded
            raise JournalError(
                f"{self._path} is not the key of this journal, so values of update --env are lost"
            ) from None

    @cached_property
    def _key(self) -> "JournalKey":
        from holdfast.journal.journal_key import JournalKey

        try:
            return JournalKey(self._path.read_text(encoding="ascii"), self._path.name)
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is damaged"
            raise JournalError(f"{self._path} cannot be read, so values of update --env are lost: {why}") from None


def _write_key(path: Path, content: bytes) -> None:
    """Write the key, whole or not at all; it is on disk before any value that it encrypts."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fsync(folder)
    os.close(folder)
