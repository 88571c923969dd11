"""Copies of the job's state in memory and on local disks: which node holds which rank's snapshot of which step."""

import msgspec

from holdfast.model.job_and_seats import Seat
from holdfast.model.message_bounds import Number, Port, SocketPath

Address = tuple[SocketPath, Port]
KEPT_DIGITS = 16


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed snapshot on a node: a rank's own, or the backup of a rank on another node."""

    rank: Number
    step: Number
    node: str
    layout: str
    world: Number
    whole: bool  # False: a backup, which lacks what other replicas hold too
    half: Number = -1  # 0, 1: of the rank's share only this half, laid over a half of another rank's
    beside: Number = -1  # that other rank, whose whole copy it takes to tell them apart
    verified: bool = False  # some steps later everything was still well
    poisoned: bool = False  # led to NaN
    disk: bool = False  # it lies on the node's disk, not in memory
    generation: Number = 0  # that made it, or held it when it was read or written; 0: not known


class CopySummary(msgspec.Struct, frozen=True, array_like=True):
    """The short form of a Copy, for restores that name thousands of copies."""

    rank: int
    node: str
    whole: bool
    layout: str  # its first digits
    half: int = -1
    beside: int = -1
    generation: int = 0  # whose state of the step it is, as its node tells; 0: not known


class LaunchOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The state that one launch resumed from."""

    generation: int
    step: int = -1  # -1: from storage, or from nothing
    maker: int = 0  # the generation that made this step; 0: not known any more
    stepped: bool = False  # the launch has told of a step


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """A ban on restoring states that this generation or an older one made after step `not_after`."""

    generation: int
    not_after: int
    proved: bool = False  # these states were wrong, as replicas differed; else they are only suspected

    def bans_state(self, generation: int, step: int) -> bool:
        return generation <= self.generation and step > self.not_after


class MissedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A step that should be on storage but could not be written. No later step was written either."""

    step: Number
    why: str  # a sentence that names the step


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes from which one rank gets its state, in the order in which to ask them."""

    rank: int
    own: bool  # it lies on the rank's own node
    nodes: tuple[str, ...] = ()
    disk: bool = False  # on their disks: no node's memory has it


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """The step from which all ranks of the next generation resume, and its sources. By default: step 0, no sources."""

    step: int = 0
    maker: int = 0  # the generation that made this step; 0: not known
    sources: tuple[Source, ...] = ()
    kept: tuple[CopySummary, ...] = ()  # all that nodes hold of this step, for ranks whose state has to be gathered
    keepers: dict[str, Address] = {}  # of the nodes that hold it
    doubts: tuple[Doubt, ...] = ()
    store: bool = False  # it becomes a checkpoint: another release goes on with it
    stored: int = -1  # without sources: the newest checkpoint that is on storage, as far as nodes have reported
    reason: str = ""
    apart: str = ""  # without sources: which step is held for which rank, if none is held for all
    replicated: bool = False  # every rank's state is the whole: a rank takes one of its node, or another rank's

    @property
    def is_held(self) -> bool:
        """Return whether ranks get this step from memory or disks, not from storage."""
        return bool(self.sources) or self.replicated


class Half(msgspec.Struct, frozen=True, kw_only=True):
    """The keeper of one half of a node's backup. It stores this half XORed with a half of another node's backup."""

    keeper: str
    keeper_at: Address = ("", 0)
    beside: int  # the first rank of the other node


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot steps that a node must hold for the job and copy to its peers."""

    generation: int
    floor: int = -1  # every rank holds it, and so do the peers: not to be given up; -1: there is none yet
    next: int = -1  # the first snapshot from this step on is to become the next floor
    verified: int = -1  # a floor after which training went on well
    peer: str = ""  # the node that keeps the copies; "": nobody does
    peer_at: Address = ("", 0)
    second: str = ""  # another node that keeps them too, with two copies; "": nobody does
    second_at: Address = ("", 0)
    halves: tuple[Half, ...] = ()  # with parity the peer keeps the first of these only
    disk: int = -1  # the floor that every node writes to its disk; -1: none just now
    disk_from: int = -1  # on every disk: older states may be removed there
    wards: tuple[Seat, ...] = ()  # whose copies this node keeps: it takes none from others
