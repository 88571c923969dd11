"""Interfaces between the controller and the world around it: journal, notes, fleet, block list, store and sockets."""

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.core.decide.job_view import JobView
from holdfast.core.membership.host_blocking import BlockedHost
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.model.action import Dismissal
from holdfast.model.decider_events import Lost
from holdfast.model.fleet_node_reports import FleetNode
from holdfast.model.journal_entry import Entry
from holdfast.model.observation import Departure

EntryListener = Callable[[Entry, JobView], None]  # gets an entry, and the job as the entry left it


class Journal(Protocol):
    """The append-only record of a job, with a single writer."""

    lost: Lost | None  # entries that were there once
    doubt: str  # why nobody knows whether some were lost; empty: it is known
    alive_at: float  # the last sign of life of the writer before; 0: not known

    @property
    def epoch(self) -> int:
        """The epoch of this writer; later writers have higher ones, and every errand carries it. Whoever is about to
        act asks for it first: raise LeaseLostError if another controller may act by now."""

    def raise_epoch(self, epoch: int) -> None:
        """Move to this epoch, because a node has heard from a newer writer. On return, the epoch is on disk."""

    def append(self, entry: Entry, durable: bool) -> None:
        """Add an entry. With `durable`, this entry and all earlier ones are on disk on return."""

    def flush(self) -> None:
        """Write all appended entries to disk before returning. Frequent calls also show that the writer is alive."""

    def read(self, after: int = 0) -> Iterator[Entry]:
        """Yield the entries with a sequence number above `after`, in order."""

    def close(self) -> None: ...


class Notes(Protocol):
    """Named values, kept beside the journal, that a controller must find again after a restart."""

    def put_note(self, name: str, content: bytes) -> None:
        """Store `content` under this name, replacing any earlier content as a whole."""

    def get_note(self, name: str) -> bytes:
        """Return the content stored under this name; empty bytes if there is none."""


class CheckpointTable(Protocol):
    """Where people find which checkpoints a run has, even while they cannot reach its storage."""

    def put_listing(self, listing: CheckpointListing) -> None:
        """Replace what the table says of this storage, soon."""


class FleetRefusal(OSError):
    """The fleet will not give nodes, however often it is asked. The text is the cluster's own explanation."""


class Fleet(Protocol):
    """The place that a job's nodes come from and go back to."""

    can_acquire: bool
    survey_s: float  # between two surveys; 0: there is nothing to survey

    async def acquire(self, count: int, evicted: Collection[str] = ()) -> tuple[str, ...]:
        """Ask for this many nodes and return their names at once. A node may still wait in a queue; it connects to the
        controller once it runs.

        The new nodes must be on other hosts than the `evicted` nodes, which the job still holds. Raise FleetRefusal if
        asking again is useless, and OSError on any other failure.
        """

    async def give_back(self, node: str, reason: str, cause: Dismissal = Dismissal.UNTOLD) -> None:
        """End the node and all processes on it. An unknown or ended node is no error. `reason` is for people. Return
        only after all processes of the node have ended, because the next generation relies on this; else raise OSError.
        A fleet without `can_acquire` cannot end nodes, so the controller does not take its return as proof."""

    async def survey(self) -> dict[str, FleetNode]:
        """Return all nodes that were acquired and not given back, as the cluster sees them now. Raise OSError if the
        cluster cannot be asked: then nothing is known."""

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that were acquired and not given back."""

    def departures(self) -> tuple[Departure, ...]:
        """Return the readable notes of nodes that left by themselves because they had lost their controller."""


class BlockList(Protocol):
    """The list of blocked hosts, which several jobs read and write. `read_entries` and `add_entry` return a future at
    once, even if the list's file system hangs. An OSError says why the list cannot be read or written."""

    flag: str  # that names the list to `holdfast blocked`; empty: none is needed

    def read_entries(self) -> Future[tuple[BlockedHost, ...] | OSError]: ...

    def add_entry(self, entry: BlockedHost) -> Future[OSError | None]: ...


class Store(Protocol):
    """The store through which the ranks of one generation find each other."""

    host: str

    async def open(self, generation: int) -> int:
        """Return the port of this generation's store, the same at every call. Raise OSError if the store cannot be
        opened. A negative number opens a store for ranks outside of any generation, such as those of a replay."""

    async def quit(self) -> None:
        """Shut down the store, because the job is over."""


class Socket(Protocol):
    """The controller's end of a link to an agent."""

    def __aiter__(self) -> AsyncIterator[Any]: ...  # of a library's own sort: they have a type and bytes

    async def send_bytes(self, data: bytes) -> None: ...

    async def close(self, *, code: int = 1000, message: bytes = b"") -> bool: ...


class ControllerPorts(msgspec.Struct, frozen=True, kw_only=True):
    """The world around one controller: the interfaces that it uses, and the listeners that get its journal entries. No
    field has a default, so the controller cannot start if a field was forgotten."""

    journal: Journal
    fleet: Fleet
    store: Store
    notes: Notes
    checkpoints: CheckpointTable | None  # None: there is no such table
    archives: Path  # of releases
    blocked: BlockList
    probe_history: Notes | None  # with earlier measurements of each node; None: none are kept
    make_clock: Callable[[float], Callable[[], float]]  # makes one that never tells less than this
    say: Callable[[str], None]  # to the person at the console
    on_entry: EntryListener
    on_replayed: EntryListener  # gets the entries of earlier controllers
