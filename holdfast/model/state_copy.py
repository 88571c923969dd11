"""What memory holds of the job's state: who has which rank's snapshot of which step."""

import msgspec

Address = tuple[str, int]
KEPT_DIGITS = 16


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed snapshot on a node: the rank's own, or a backup of a rank that sits elsewhere."""

    rank: int
    step: int
    node: str
    layout: str
    world: int
    whole: bool  # False: a backup, which lacks what other replicas hold too
    half: int = -1  # 0, 1: of the rank's share only this half, laid over a half of another rank's
    beside: int = -1  # that other rank, whose whole copy it takes to tell them apart
    verified: bool = False  # some steps later everything was still well
    poisoned: bool = False  # led to NaN


class CopySummary(msgspec.Struct, frozen=True, array_like=True):
    """A copy, in few words: a restore names thousands."""

    rank: int
    node: str
    whole: bool
    layout: str  # its first digits
    half: int = -1
    beside: int = -1


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """States after this step that this generation or an older one has made are not to be gone on from."""

    generation: int
    not_after: int


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank gets its state from: nodes in the order in which they should be asked."""

    rank: int
    own: bool  # it lies on the rank's own node
    nodes: tuple[str, ...] = ()


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """The step that every rank of the next generation goes on from, and how; step 0 and no sources: from nothing."""

    step: int = 0
    sources: tuple[Source, ...] = ()
    kept: tuple[CopySummary, ...] = ()  # all that nodes hold of this step, for ranks whose state has to be gathered
    keepers: dict[str, Address] = {}  # of the nodes that hold it
    doubts: tuple[Doubt, ...] = ()
    store: bool = False  # it becomes a checkpoint: another release goes on with it
    reason: str = ""


class Half(msgspec.Struct, frozen=True, kw_only=True):
    """Where one half of what a node's ranks back up is kept, laid over a half of another node's."""

    keeper: str
    keeper_at: Address = ("", 0)
    beside: int  # the first rank of the other node


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps a node is to hold for the others' sake, and to copy to its peer."""

    generation: int
    floor: int = -1  # every rank holds it, and so does every peer: not to be given up; -1: there is none yet
    next: int = -1  # the first snapshot from this step on is to become the next floor
    verified: int = -1  # a floor after which training went on well
    peer: str = ""  # the node that keeps the copies; "": nobody does
    peer_at: Address = ("", 0)
    halves: tuple[Half, ...] = ()  # with parity the peer keeps the first of these only
