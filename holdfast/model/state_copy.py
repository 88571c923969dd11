"""Copies of the job's state in memory and on local disks: which node holds which rank's snapshot of which step."""

import msgspec

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
    cuts: tuple[Number, Number, Number] | None = None  # ranks whose shares can be cut out of it: first, stride, count


class CopySummary(msgspec.Struct, frozen=True, array_like=True):
    """The short form of a Copy, for restores that name thousands of copies."""

    rank: int
    node: str
    whole: bool
    layout: str  # its first digits
    half: int = -1
    beside: int = -1
    generation: int = 0  # whose state of the step it is, as its node tells; 0: not known
