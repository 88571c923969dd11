"""Observations at the edge, before a detector has made a claim of them."""

import msgspec


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process ended, or told us that it is about to: code is negative for a signal."""

    node: str
    generation: int
    rank: int
    code: int
    at: float
    words: tuple[str, ...] = ()  # its last lines, newest last
    latched: str = ""  # what it wrote into its slot before it went


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells of its loss since it first was not finite."""

    node: str
    generation: int
    rank: int
    step: int  # where it first was not
    loss: float  # newest
    at: float


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """One node's summary of its ranks: the slowest rank's step speaks for the node."""

    node: str
    generation: int
    step: int  # -1: not every rank of the node has made a step
    at: float  # when the slowest rank reached that step
    first_step: int = -1
    first_at: float = 0.0
    counted: bool = True  # steps counted by us since launch, not told by the script
    loss: float | None = None
    phase: str = ""
    sealed: int = -1  # newest snapshot that every rank of the node has taken
    backed: int = -1  # newest that was wanted as a floor, and now is held here and by the peer
    kept: int = -1  # with parity: newest of which this node keeps all that it is to keep for others
    stored: int = -1  # newest checkpoint that was published from here in this generation
    verifies: bool = False  # a snapshot found good is to be kept beside the others
    backing_s: float = 0.0  # what it took to copy that


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """A number that a source has read of a machine."""

    name: str  # such as gpu.ecc_uncorrected
    of: str  # what it was read of: "GPU 3", "eth0", "/scratch"
    value: float
    at: float


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line that somebody has written: the kernel, or a rank."""

    text: str
    at: float
    rank: int = -1  # -1: the kernel
