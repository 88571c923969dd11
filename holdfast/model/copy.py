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
    verified: bool = False  # some steps later everything was still well
    poisoned: bool = False  # led to NaN


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A copy, in few words: a restore names thousands."""

    rank: int
    node: str
    whole: bool
    layout: str  # its first digits


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank gets its state from: nodes in the order in which they should be asked."""

    rank: int
    own: bool  # it lies on the rank's own node
    nodes: tuple[str, ...] = ()


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """The step that every rank of the next generation goes on from, and how; step 0 and no sources: from nothing."""

    step: int = 0
    sources: tuple[Source, ...] = ()
    kept: tuple[Kept, ...] = ()  # all that nodes hold of this step, for ranks whose state has to be gathered
    keepers: dict[str, Address] = {}  # of the nodes that hold it
    reason: str = ""


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps a node is to hold for the others' sake, and to copy to its peer."""

    generation: int
    floor: int = -1  # every rank holds it, and so does every peer: not to be given up; -1: there is none yet
    next: int = -1  # the first snapshot from this step on is to become the next floor
    verified: int = -1  # a floor after which training went on well
    peer: str = ""  # the node that keeps the copies; "": nobody does
    peer_at: Address = ("", 0)
