"""Ports of a keeper and its parts: memory, a clock, callbacks for news, and interfaces for the sender of copies."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from holdfast.agent.agent_clock import AgentClock
from holdfast.core.snapshots.floor_pins_and_copies import CopyParcel, CopyRun, OwnSnapshot, Sealed
from holdfast.model.observation import Mark
from holdfast.wire.rank_keeper_messages import ArenaRequest

MakeArena = Callable[[str, int], Awaitable[str]]


class KeeperPorts(NamedTuple):
    make_arena: MakeArena  # by name and size, in memory of the holder; returns its path; size 0 gives the memory back
    clock: AgentClock
    say: Callable[[str], None]  # shows a sentence on the console of the job
    report_progress: Callable[[], None]  # tells the controller now how far the copies are
    report_marks: Callable[[tuple[Mark, ...]], None]  # tells the controller hashes of state that replicas share


class OwnSnapshots(Protocol):
    """The snapshots of this node's ranks."""

    def list_snapshots(self) -> Sealed:
        """Return the sealed snapshots, for each rank the newest first."""

    def count_slots(self, rank: int) -> int: ...

    def pin_own(self, snapshot: OwnSnapshot, *, spare: bool, late: bool = False) -> bool:
        """Keep the rank from overwriting a snapshot; False if that is gone or, with `spare`, no slot can be spared."""

    def unpin_own(self, snapshot: OwnSnapshot) -> None: ...

    def mark_verified(self, snapshot: OwnSnapshot) -> None: ...


class CopyTransport(Protocol):
    """Sends copies to other nodes."""

    async def send_parcel(self, parcel: CopyParcel, want: ArenaRequest, run: CopyRun) -> str:
        """Send a part of a pinned snapshot; return why that failed, empty if it arrived or a later step replaced it.

        After the run is cancelled this call ends soon, whether or not everything has arrived.
        """
