"""The list of blocked hosts on disk, which all jobs of a user, or of a site, share."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from holdfast.core.membership.host_blocking import BlockedHost
from holdfast.decoding import from_json
from holdfast.wire import folder_use_lock
from holdfast.wire.credentials import mutual_tls

_LOCK_S = 10.0
_MOST_BYTES = 16 << 20  # a longer one is torn, and said to be damaged
Entries = tuple[BlockedHost, ...]
Found = TypeVar("Found")


class BlockListError(OSError):
    """Says in one sentence why the list cannot be used."""


class BlockListFile:
    """The block list in a file; a missing file is an empty list. Each call reads the file again, because it may change
    at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_entries(self) -> Entries:
        """Return all entries, also expired ones. Raise BlockListError if the file cannot be read or may be forged."""
        where = f"the list of blocked hosts {self.path}"
        try:
            with open(self.path, "rb", opener=_open_itself) as file:
                seen, content = os.fstat(file.fileno()), file.read(_MOST_BYTES)
        except FileNotFoundError:
            return ()
        except OSError as e:
            raise BlockListError(f"{where} cannot be read: {e.strerror}") from None
        if seen.st_uid not in (os.getuid(), 0):
            raise BlockListError(f"{where} is another user's, so it is not used")
        if seen.st_mode & 0o022:
            raise BlockListError(f"{where} is not used, because other users may write to it; chmod go-w it")
        try:
            return from_json(content, Entries)
        except msgspec.DecodeError as e:
            raise BlockListError(f"{where} is damaged: {e}; mend it or remove it") from None

    def add_entry(self, entry: BlockedHost) -> None:
        """Add an entry. It replaces older entries that block no other host or GPU and do not expire later."""
        self.change(entry.at, lambda entries: with_entry(entries, entry))

    def change(self, now: float, rewrite: Callable[[Entries], Entries]) -> None:
        """Remove expired entries from the list, and replace the others by what `rewrite` returns for them. A lock keeps
        other processes out meanwhile. Raises BlockListError."""
        try:
            self.path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            lock = folder_use_lock.lock_file_alone(self.path.with_name(f"{self.path.name}.lock"), _LOCK_S)
            if lock is None:
                raise BlockListError(f"another process has held {self.path}.lock for {_LOCK_S:g} s")
            try:
                left = rewrite(without_expired(self.read_entries(), now))
                content = msgspec.json.format(msgspec.json.encode(left))
                mutual_tls.write_file_of_mode(self.path, content, self._present_mode(), durable=True)
            finally:
                os.close(lock)
        except BlockListError:
            raise
        except OSError as e:
            raise BlockListError(f"the list of blocked hosts {self.path} cannot be written: {e.strerror}") from None

    def _present_mode(self) -> int:
        """Return the mode for the file's next version: its owner may write, and others may read if they may now."""
        with contextlib.suppress(FileNotFoundError):
            return 0o600 | self.path.stat().st_mode & 0o044
        return 0o600


class SharedBlockList(Protocol):
    """A block list that several jobs and people change; its methods raise BlockListError on failure."""

    def read_entries(self) -> Entries: ...

    def add_entry(self, entry: BlockedHost) -> None: ...

    def change(self, now: float, rewrite: Callable[[Entries], Entries]) -> None: ...


class BlockListThreads:
    """The block list as the controller uses it: every call runs in a thread, as a file system or database may hang."""

    def __init__(self, listed: SharedBlockList, flag: str) -> None:
        """`flag` is the option by which `holdfast blocked` finds this list; "" for its default list."""
        self._listed, self.flag = listed, flag

    def read_entries(self) -> Future[Entries | OSError]:
        return _call_in_thread(self._listed.read_entries)

    def add_entry(self, entry: BlockedHost) -> Future[OSError | None]:
        return _call_in_thread(lambda: self._listed.add_entry(entry))


def _call_in_thread(call: Callable[[], Found]) -> Future[Found | OSError]:
    """Run a call in a daemon thread, so that a hanging call delays neither other calls nor the controller's exit."""
    answer: Future[Found | OSError] = Future()
    answer.set_running_or_notify_cancel()  # nobody can cancel it from here on

    def carry() -> None:
        try:
            answer.set_result(call())
        except OSError as e:
            answer.set_result(e)

    threading.Thread(target=carry, name="holdfast-blocked", daemon=True).start()
    return answer


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def with_entry(entries: Entries, entry: BlockedHost) -> Entries:
    """Return the list with this entry, without older ones that block no other host or GPU and do not expire later."""
    return (*(old for old in entries if not _is_within(old, entry)), entry)


def without_expired(entries: Entries, now: float) -> Entries:
    return tuple(entry for entry in entries if entry.until > now)


def _is_within(old: BlockedHost, new: BlockedHost) -> bool:
    return old.until <= new.until and old.id in ("", new.id) and set(old.gpus) <= set(new.gpus)
