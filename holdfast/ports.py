"""What a shell must offer to the controller."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

from holdfast.model.event import Entry, Lost


class Journal(Protocol):
    """The record of a job: one writer, append only."""

    epoch: int  # of this writer: it and all before it
    lost: Lost | None  # entries that were there once
    doubt: str  # why nobody knows whether some were lost; empty: it is known

    def raise_epoch(self, epoch: int) -> None:
        """Move to this epoch, because a node has heard from a writer that this journal does not know. The new epoch
        is on disk when this returns."""

    def append(self, entry: Entry, durable: bool) -> None:
        """Add an entry; with `durable` it and all before it are on disk when this returns."""

    def flush(self) -> None:
        """All that was appended is on disk when this returns."""

    def read(self, after: int = 0) -> Iterator[Entry]:
        """Entries with a sequence number above `after`, in order."""

    def close(self) -> None: ...


class Notes(Protocol):
    """What a controller must find again as it was when it comes back, beside the journal."""

    def put_tensor(self, name: str, content: bytes) -> None:
        """Write it down, whole, in the place of what was there under this name."""

    def get_tensor(self, name: str) -> bytes:
        """What was written down; nothing if nothing was."""


class Fleet(Protocol):
    """Where nodes come from."""

    can_acquire: bool

    async def acquire(self, count: int) -> tuple[str, ...]:
        """Start this many nodes and name them; each dials the controller when it is up. OSError if none can be had."""

    async def give_back(self, node: str, reason: str) -> None:
        """End the node and everything below it; unknown or ended nodes are no error.

        When this returns, nothing of it lives: the next generation relies on that. OSError if it is not known. A fleet
        that cannot acquire cannot end nodes either, and is not believed.
        """

    def nodes(self) -> tuple[str, ...]:
        """The nodes that were acquired and not released."""


class Store(Protocol):
    """Where the ranks of a generation find each other."""

    host: str

    async def open(self, generation: int) -> int:
        """The port of this generation's own store, the same however often it is asked; OSError if there is none.

        Numbers below 0 are of groups beside the generations.
        """

    async def quit(self) -> None:
        """The job is over."""


class Socket(Protocol):
    """The controller's end of a link to an agent."""

    def __aiter__(self) -> AsyncIterator[Any]: ...  # of a library's own sort: they have a type and bytes

    async def send_bytes(self, data: bytes) -> None: ...

    async def close(self, *, code: int = 1000, message: bytes = b"") -> bool: ...
