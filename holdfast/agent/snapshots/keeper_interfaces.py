"""Ports of a keeper and its parts: memory, a clock, notes, connections, a disk, and callbacks for news."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from holdfast.agent.agent_clock import AgentClock
from holdfast.agent.snapshots.step_gap_watch import NetworkLooksOfRanks
from holdfast.checkpoint.byte_pacer import BytePacer
from holdfast.checkpoint.disk_state_record import DiskState
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.peer_server import PeerShelf
from holdfast.checkpoint.peer_transport import PeerRequest
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.core.snapshots.disk_floor_coordination import DiskLimits
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.model.copy_aim import Aim
from holdfast.model.observation import Mark
from holdfast.model.state_copy import Address, Copy
from holdfast.wire.credentials.admitted_peers import AdmittedPeers
from holdfast.wire.rank_keeper_messages import AnswerRank

MakeArena = Callable[[str, int], Awaitable[str]]
IsWanted = Callable[[int], bool]  # a state on disk, by its generation
WaitForLoop = Callable[[Coroutine[Any, Any, str], asyncio.AbstractEventLoop], str]


def any_generation(generation: int) -> bool:
    return True


class KeeperPorts(NamedTuple):
    make_arena: MakeArena  # by name and size, in memory of the holder; returns its path; size 0 gives the memory back
    clock: AgentClock
    say: Callable[[str], None]  # shows a sentence on the console of the job
    report_progress: Callable[[], None]  # tells the controller now how far the copies are
    report_checkpoints: Callable[[CheckpointListing], None]  # tells the controller what is published at a storage
    report_marks: Callable[[tuple[Mark, ...]], None]  # tells the controller hashes of state that replicas share
    network: NetworkLooksOfRanks  # looks of this node's ranks at their network


class KeeperNotes(Protocol):
    """Notes by name, which outlive an agent. Reading and writing raise OSError."""

    def read_note(self, name: str) -> bytes: ...
    def write_note(self, name: str, content: bytes) -> None: ...
    def list_notes(self, prefix: str) -> list[str]: ...


class KeeperLinks(Protocol):
    """Connections to the ranks of this node and to keepers of other nodes. Methods that push, pull or fetch are called
    in threads, and raise TransportError or OSError."""

    def admit_peers(self, peers: AdmittedPeers) -> None:
        """From now on accept the keepers of these nodes, and no others; nobody is accepted before the first call."""

    @property
    def address(self) -> Address:
        """Where other keepers reach this keeper: host and port, or socket path and 0. Until it listens, ("", 0)."""

    async def serve(self, answer_rank: AnswerRank, shelf: PeerShelf) -> None:
        """Answer ranks and other keepers until this is cancelled."""

    def push_state(self, to: Address, ask: PeerRequest, views: Sequence[memoryview], pacer: BytePacer) -> int: ...
    def pull_state(self, at: Address, ask: PeerRequest, views: Sequence[memoryview]) -> int: ...
    def fetch_content(self, at: Address, ask: PeerRequest) -> bytes: ...


class StateDisk(Protocol):
    """States of this node's ranks on its local disk."""

    limits: DiskLimits
    unseen: bool  # nobody has tried yet whether anything can be written
    written: int  # newest step that is on disk
    tried: int  # newest that is, or could not be written
    final: int  # that was written when the node left the job

    def begin_generation(self, author: Author) -> None: ...
    async def use_run(self, run: str) -> None: ...
    async def look_at_path(self) -> None: ...
    def list_copies(self, node: str) -> list[Copy]: ...
    def find_state(
        self, rank: int, layout: str, step: int | None = None, is_wanted: IsWanted = any_generation
    ) -> DiskState | None: ...
    def read_image(self, state: DiskState, into: memoryview) -> None: ...
    def open_image(self, rank: int, layout: str, step: int, generation: int) -> memoryview | None: ...
    async def follow_aim(self, aim: Aim, ranks: Sequence[int]) -> None: ...
    def remove_given_up(self, launch: KeeperLaunch) -> None: ...
    def remove_run(self) -> None: ...
    async def write_final(self, step: int, ranks: Sequence[int], within_s: float) -> None: ...
    async def leave_job(
        self, ranks: Sequence[int], stored: int, spared: Sequence[int], not_after: int, *, answered: bool
    ) -> None: ...
