"""The lease of a run whose directory several hosts see: the controller may move between hosts, but only one acts.

Each holder makes a file of its own, RUN_DIR/lease/N, one number after the newest. No two hosts can make the same file,
on any file system. The holder rewrites its file again and again. Whoever sees no change for as long as a lease lasts,
on its own clock, may take the next number. No clocks of two hosts are compared, and no locks are needed.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.decoding import from_json
from holdfast.journal.journal_errors import LeaseLostError
from holdfast.journal.lease_term import LeaseTerm, boot_time, read_boot_id

FOLDER = "lease"  # of the run directory
LASTS_S = 30.0  # without a renewal for this long, another controller may take over
_RENEW_S = 3.0
_MARGIN_S = 5.0
_LOOK_S = 0.5
_BYTES = 512  # of a lease's file, always: so a renewal changes no length


class _Content(msgspec.Struct, frozen=True):
    holder: str = ""
    renewals: int = 0
    ended: bool = False


def own_holder() -> str:
    """Return the name by which this host holds leases. A host that has rebooted has another name: what ran is gone."""
    return f"{socket.gethostname()} {read_boot_id()}"


class FileLease:
    """One controller's part in the lease. The lease is also ours if an earlier controller of this host has it: the lock
    on the controller's file keeps two of them apart."""

    def __init__(self, folder: Path, holder: str, say: Callable[[str], None], *, lasts_s: float = LASTS_S) -> None:
        self._folder, self._holder, self._say = folder, holder, say
        self._lasts_s, self._share = lasts_s, lasts_s / LASTS_S
        self._term = LeaseTerm(f"the lease in {folder}", lasts_s, _MARGIN_S * self._share)
        self._number = self._renewals = 0
        self._writing, self._ended = threading.Lock(), False  # a renewal may still be under way in its thread
        self.seen: tuple[int, bytes] = (0, b"")  # the newest lease and what was in it
        self._seen_at = 0.0  # when that changed last, by our clock

    # --- taking ------------------------------------------------------------------------------------------------

    async def take(self) -> None:
        """Wait until no other host has the lease, and take it."""
        told = ""
        while True:
            try:
                if await asyncio.to_thread(self.try_to_take):
                    return
                held = f"the lease in {self._folder} is held by {self.carrier_text()}; waiting until it is free"
            except OSError as e:
                held = f"the lease in {self._folder} cannot be taken yet: {e.strerror or e}"
            if held != told:
                self._say(told := held)
            await asyncio.sleep(_LOOK_S * self._share)

    def try_to_take(self) -> bool:
        """Take the lease if it is free; return whether it is ours now."""
        asked_at = boot_time()
        if not self.is_free() or not self._make_file(self.seen[0] + 1):
            return False
        self._number = self.seen[0] + 1
        self._term.begin(asked_at)
        for older in self._numbers():
            if older < self._number - 1:  # the one before may look at its own still
                self._path(older).unlink(missing_ok=True)
        return True

    def is_free(self) -> bool:
        """Return whether the lease can be taken: it is this host's own, was given up, or has not changed for as long
        as it lasts while we looked."""
        newest = max(self._numbers(), default=0)
        content = self._path(newest).read_bytes() if newest else b""
        if (newest, content) != self.seen or not self._seen_at:
            self.seen, self._seen_at = (newest, content), boot_time()
        found = _parse(content)
        return not newest or found.ended or found.holder == self._holder or boot_time() > self._seen_at + self._lasts_s

    def carrier_text(self) -> str:
        """Name the host that had the lease when we looked last."""
        return _parse(self.seen[1]).holder.partition(" ")[0] or "another host"

    def _numbers(self) -> list[int]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return [int(name) for name in os.listdir(self._folder) if name.isdecimal()]

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    def _make_file(self, number: int) -> bool:
        """Make the file of this number. Return False if another host was faster."""
        with contextlib.suppress(FileExistsError):
            self._write(number, os.O_CREAT | os.O_EXCL, _Content(self._holder))
            return True
        return False

    def _write(self, number: int, flags: int, content: _Content) -> None:
        fd = os.open(self._path(number), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            os.pwrite(fd, msgspec.json.encode(content).ljust(_BYTES), 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    # --- keeping -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise LeaseLostError if another host may have the lease by now. This reads no file."""
        self._term.check()

    async def keep(self) -> None:
        """Renew the lease forever. Raise LeaseLostError once it cannot be ours any more."""
        while True:
            await asyncio.sleep(_RENEW_S * self._share)
            try:
                await asyncio.to_thread(self.renew)
            except OSError:
                self._term.check()  # while it is ours, the file system may come back

    def renew(self) -> None:
        """Renew the lease. Raise LeaseLostError if another host has it, OSError if the file system fails."""
        asked_at = boot_time()
        self._term.check()
        with self._writing:
            if self._ended:
                return
            self._renewals += 1
            self._write(self._number, 0, _Content(self._holder, self._renewals))
        if (newest := max(self._numbers())) > self._number:
            other = _parse(self._path(newest).read_bytes()).holder.partition(" ")[0] or "another host"
            raise LeaseLostError(f"{other} has the lease in {self._folder} now; this controller ends")
        self._term.renew(asked_at)

    async def let_go(self) -> None:
        """Give up the lease, so that the next controller need not wait."""
        await asyncio.to_thread(self._give_up)

    def _give_up(self) -> None:
        with self._writing, contextlib.suppress(OSError):
            self._ended = True
            if self._term.left_s:
                self._write(self._number, 0, _Content(self._holder, self._renewals, ended=True))


def take_when_quiet(lease: FileLease) -> bool:
    """Wait until the lease has not changed for as long as it lasts, and take it for this host. Return False as soon as
    it changes, because its holder is alive then."""
    first: tuple[int, bytes] | None = None
    while not lease.try_to_take():
        if (first := first or lease.seen) != lease.seen:
            return False
        time.sleep(_LOOK_S)
    return True


def _parse(content: bytes) -> _Content:
    try:
        return from_json(content, _Content) if content.strip() else _Content()
    except msgspec.DecodeError:
        return _Content()  # one that is just being written: another look tells more
