"""Tokens of people: each has a name and a right, is kept only as a digest, and can be revoked while jobs run."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.controller.access.caller_admission import Right, UserToken, make_user_token
from holdfast.decoding import from_json
from holdfast.wire import folder_use_lock
from holdfast.wire.credentials import mutual_tls

_LOOK_S = 1.0
_LOCK_S = 10.0  # for another command that changes tokens


class UserTokens:
    """The run's own token, and the user tokens in a file, which is read again whenever it changes."""

    def __init__(self, path: Path, own: tuple[UserToken, ...]) -> None:
        self._path, self._own = path, own
        self._seen: tuple[int, int] | None = None
        self._read: tuple[UserToken, ...] = ()
        self._look_at = 0.0

    def __call__(self) -> tuple[UserToken, ...]:
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_S
            self._reload_changed()
        return (*self._own, *self._read)

    def _reload_changed(self) -> None:
        try:
            found = self._path.stat()
            seen = (found.st_mtime_ns, found.st_ino)
            if seen != self._seen:
                self._seen, self._read = seen, read_tokens(self._path)
        except OSError:
            self._seen, self._read = None, ()  # whoever removes the file revokes all


class UserTokenError(Exception):
    """Says in one sentence why no token was changed."""


def read_tokens(path: Path) -> tuple[UserToken, ...]:
    """Return the tokens of a file; empty if it is missing, damaged, or can be written by others."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ()
    with os.fdopen(fd, "rb") as file:
        seen = os.fstat(fd)
        if seen.st_uid != os.getuid() or seen.st_mode & 0o022:
            return ()
        try:
            return from_json(file.read(), tuple[UserToken, ...])
        except msgspec.DecodeError:
            return ()


def add_token(path: Path, name: str, right: Right) -> str:
    """Make a token, store its digest, and return the token; the token itself is stored nowhere."""
    if not name or not name.isprintable() or len(name) > 100:
        raise UserTokenError("a token's name must have 1 to 100 printable characters")
    token = os.urandom(16).hex()
    with _changing_tokens(path) as badges:
        if any(badge.name == name for badge in badges):
            raise UserTokenError(f"{name} already has a token; revoke it first, or choose another name")
        _write_tokens(path, (*badges, make_user_token(name, right, token)))
    return token


def revoke_token(path: Path, name: str) -> None:
    with _changing_tokens(path) as badges:
        if not any(badge.name == name for badge in badges):
            names = ", ".join(badge.name for badge in badges) or "nobody"
            raise UserTokenError(f"{name} has no token; tokens exist for {names}")
        _write_tokens(path, tuple(badge for badge in badges if badge.name != name))


@contextlib.contextmanager
def _changing_tokens(path: Path) -> Iterator[tuple[UserToken, ...]]:
    """Lock a file of tokens and yield its tokens. Without the lock, another command that changes the file could bring a
    revoked token back."""
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    lock = folder_use_lock.lock_file_alone(path.with_name(f"{path.name}.lock"), _LOCK_S)
    if lock is None:
        raise UserTokenError(f"another process has held {path}.lock for {_LOCK_S:g} s")
    try:
        yield read_tokens(path)
    finally:
        os.close(lock)


def _write_tokens(path: Path, badges: tuple[UserToken, ...]) -> None:
    mutual_tls.write_secret(path, msgspec.json.format(msgspec.json.encode(badges)))
