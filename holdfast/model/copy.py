"""What memory holds of the job's state: who has which rank's snapshot of which step."""

import msgspec


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


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank gets its state from: nodes in the order in which they should be asked."""

    rank: int
    own: bool  # it lies on the rank's own node
    nodes: tuple[str, ...] = ()  # nodes with the rank's own part
    replicas: tuple[str, ...] = ()  # nodes with what its replicas share


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """The step that every rank of the next generation goes on from, and how; step 0 and no sources: from nothing."""

    step: int = 0
    sources: tuple[Source, ...] = ()
    reason: str = ""
