"""People's tokens: each has a name and a right, is kept as a digest alone, and can be revoked while jobs run."""

import os
import time
from pathlib import Path

import msgspec

from holdfast.controller.door import Badge, Right, badge_of
from holdfast.core.decoding import from_json
from holdfast.wire import identity

_LOOK_S = 1.0


class Badges:
    """Those of one file, read again when it has changed, and those of the run itself."""

    def __init__(self, path: Path, own: tuple[Badge, ...]) -> None:
        self._path, self._own = path, own
        self._seen: tuple[int, int] | None = None
        self._read: tuple[Badge, ...] = ()
        self._look_at = 0.0

    def __call__(self) -> tuple[Badge, ...]:
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look()
        return (*self._own, *self._read)

    def _look(self) -> None:
        try:
            found = self._path.stat()
            seen = (found.st_mtime_ns, found.st_ino)
            if seen != self._seen:
                self._seen, self._read = seen, read(self._path)
        except OSError:
            self._seen, self._read = None, ()  # whoever removes the file revokes all


class BadgeError(Exception):
    """One sentence: why nothing was changed."""


def read(path: Path) -> tuple[Badge, ...]:
    """None where there is no such file; one that is damaged, or that others may write, lets nobody in."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ()
    with os.fdopen(fd, "rb") as file:
        seen = os.fstat(fd)
        if seen.st_uid != os.getuid() or seen.st_mode & 0o022:
            return ()
        try:
            return from_json(file.read(), tuple[Badge, ...])
        except msgspec.DecodeError:
            return ()


def add(path: Path, name: str, right: Right) -> str:
    """The new token, which is told once and kept nowhere."""
    badges = read(path)
    if not name or not name.isprintable() or len(name) > 100:
        raise BadgeError("a token's name has 1 to 100 printable characters")
    if any(badge.name == name for badge in badges):
        raise BadgeError(f"there is a token of {name} already; revoke it first, or take another name")
    token = os.urandom(16).hex()
    _write(path, (*badges, badge_of(name, right, token)))
    return token


def revoke(path: Path, name: str) -> None:
    badges = read(path)
    if not any(badge.name == name for badge in badges):
        raise BadgeError(f"there is no token of {name}; there are {', '.join(b.name for b in badges) or 'none'}")
    _write(path, tuple(badge for badge in badges if badge.name != name))


def _write(path: Path, badges: tuple[Badge, ...]) -> None:
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    identity.put_secret(path, msgspec.json.format(msgspec.json.encode(badges)))
