"""The controller's simulated disk: committed entries outlive the controller, appended ones do not."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future

from holdfast.core.membership.host_blocking import BlockedHost
from holdfast.model.action import Launch
from holdfast.model.decider_events import Lost
from holdfast.model.journal_entry import Entry


class SimDisk:
    """A run's journal and notes, kept across the lives of its controllers."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.notes: dict[str, bytes] = {}
        self.epoch = 0
        self.lost: Lost | None = None
        self._launched: Launch | None = None  # the newest

    def commit_entries(self, entries: list[Entry]) -> None:
        self.entries += entries
        self.lost = None  # what is known of it stands in the journal now
        for launch in (a for e in entries for a in e.decision.actions if isinstance(a, Launch)):
            self._launched = launch

    def lose_entries(self, kept: int) -> None:
        """Keep the first `kept` entries of the journal, and describe the loss in `lost` as the real journal would."""
        of, phase, launch = len(self.entries), self.entries[-1].decision.phase, self._launched
        generation, release = (launch.generation, launch.release.number) if launch else (0, 0)
        self.lost = Lost(kept=kept, of=of, generation=generation, release=release, phase=phase)
        del self.entries[kept:]


class EmptyBlockList:
    """The block list of a simulated site, which must stay empty because the simulated machines are never at fault."""

    flag = ""

    def read_entries(self) -> Future[tuple[BlockedHost, ...] | OSError]:
        empty: Future[tuple[BlockedHost, ...] | OSError] = Future()
        empty.set_result(())
        return empty

    def add_entry(self, entry: BlockedHost) -> Future[OSError | None]:
        raise AssertionError(f"{entry.host} was blocked: {entry.reason}")


class DiskNotes:
    """One controller's access to the notes on its disk."""

    def __init__(self, disk: SimDisk, strike: Callable[[str], None]) -> None:
        self._disk = disk
        self._strike = strike

    def put_note(self, name: str, content: bytes) -> None:
        self._strike("noting")
        self._disk.notes[name] = content
        self._strike("noted")

    def get_note(self, name: str) -> bytes:
        return self._disk.notes.get(name, b"")


class DiskJournal:
    """One controller's access to the journal; `strike` is called at every point at which a crash would matter."""

    def __init__(self, disk: SimDisk, strike: Callable[[str], None]) -> None:
        self._disk = disk
        self._open: list[Entry] = []
        self.lost = disk.lost
        self.doubt = ""
        self.alive_at = 0.0
        self.epoch = disk.epoch = disk.epoch + 1
        self._strike = strike

    def append(self, entry: Entry, durable: bool) -> None:
        self._strike("decided")
        self._open.append(entry)
        if durable:
            self._commit()
            self._strike("written")

    def flush(self) -> None:
        if self._open:
            self._strike("unflushed")
            self._commit()
            self._strike("flushed")

    def _commit(self) -> None:
        self._disk.commit_entries(self._open)
        self._open = []

    def read(self, after: int = 0) -> Iterator[Entry]:
        yield from list(self._disk.entries[after:])

    def raise_epoch(self, epoch: int) -> None:
        self.epoch = self._disk.epoch = epoch

    def close(self) -> None:
        self.flush()
