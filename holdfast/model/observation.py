"""Signals: raw observations of nodes and ranks, before a detector makes alarms of them."""

from enum import StrEnum

import msgspec

from holdfast.model.job_and_seats import Dims
from holdfast.model.message_bounds import Instant, Name, Number, Real
from holdfast.model.rank_traces import Arrival
from holdfast.model.stored_checkpoint_report import MissedCheckpoint


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process has ended, or has announced its end; `code` is negative for a signal."""

    node: str
    generation: int
    rank: int
    code: int
    at: float
    words: tuple[str, ...] = ()  # its last lines, newest last
    said: str = ""  # the very last of them, of whichever stream, that is not ours
    latched: str = ""  # what it wrote into its slot before it went
    starved: bool = False  # the kernel has just counted a kill for want of memory among what is this node's own
    pressed: str = ""  # where nobody can know that: the sign that memory was scarce just before


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's report that its loss was not finite, for one step or for two in a row."""

    node: str
    generation: int
    rank: int
    step: int  # of the first of them
    loss: float  # newest; finite if the rank has gone on meanwhile
    at: float
    numbered: bool = True  # the step has the job's number; else it is counted since the launch
    also: tuple[int, ...] = ()  # other ranks of the node with the same loss since the same step


class StepValues(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a rank reported for one step."""

    generation: int
    rank: int
    step: int
    at: float
    loss: float | None = None
    grad_norm: float | None = None  # of the gradient that all replicas share
    own_norm: float | None = None  # of the rank's own, before it is summed
    update: float | None = None  # the largest RMS of a tensor's step, where the optimizer is watched
    numbered: bool = True  # the step has the job's number; else it is counted since the launch


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A hash of the state that a rank shares with its replicas, at one step."""

    rank: Number
    step: Number
    group: str  # the same for those who share it
    count: Number  # how many they are
    part: str  # of the state
    value: int


class StrainKind(StrEnum):
    """The kind of a strain: it slows the job, it makes the job stand still, or it is a link that is or was down."""

    SLOWS = "slows"  # a job that has lost its pace: heat, a power brake
    STANDS = "stands"  # a job that stands: a driver that does not answer
    CUT = "cut"  # a link is down
    FLAPPED = "flapped"  # a link was down not long ago


class Strain(msgspec.Struct, frozen=True, kw_only=True):
    """A lasting state of a machine that its readings show, such as heat. It matters only if the job or other machines
    have trouble at the same time."""

    kind: StrainKind
    sign: str  # the signature of an alarm about the same reading
    nodes: tuple[str, ...]  # that are on the machine
    since: Instant
    text: str  # in words, to be said of a node


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """One node's summary of its ranks; its step is that of the slowest rank."""

    node: str
    generation: Number
    step: Number  # -1: not every rank of the node has made a step
    at: Instant  # when the slowest rank reached that step
    sent: Instant = 0.0  # when it was said; 0: unknown
    exact: bool = False  # its times are by the very clock of the controller's machine
    first_step: Number = -1
    first_at: Instant = 0.0
    counted: bool = True  # steps counted by us since launch, not told by the script
    origin: Number = -1  # where counted: steps made before the first; -1: nobody knows
    made_up: bool = False  # optimizers have counted one more
    loss: float | None = None  # of that step if a rank tells it, else the newest of any of its ranks
    loss_step: Number = -1  # the step that it belongs to, counted as `step` is; -1: none, or not known
    loss_source: Name = ""  # where losses are read from, if the script does not report them itself
    trackers: Name = ""  # those of W&B, MLflow and TensorBoard that the script uses and that get the job's figures
    phase: Name = ""
    arrivals: dict[Number, tuple[Arrival, ...]] = {}  # by rank: when it came to its newest collectives
    gpus: dict[Number, str] = {}  # by rank: the UUID of its GPU, where the rank tells it
    sealed: Number = -1  # newest snapshot that every rank of the node has taken
    backed: Number = -1  # newest that was wanted as a floor, and now is held here and by the peers
    absent: Name = ""  # of two peers the one that could not be given that; "": all have it
    kept: Number = -1  # with parity: newest of which this node keeps all that it is to keep for others
    stored: Number = -1  # newest checkpoint that was published from here in this generation
    missed: MissedCheckpoint | None = None  # since then
    stored_at: Instant = 0.0  # when it was; 0: not known
    disked: Number = -1  # newest floor of this generation on the node's disk
    disk_tried: Number = -1  # newest floor that it has written there, or could not write
    verifies: bool = False  # a snapshot found good is to be kept beside the others
    backing_s: Real = 0.0  # what it took to copy that
    backing_rest_s: Real = -1.0  # how long the next copy is to wait; below 0: as that time and backup.duty say
    pacing: Name = ""  # of copies: "gaps" between collectives, or "duty" and why; "": none has begun
    compares: bool = False  # what its ranks share with others is hashed
    mesh: Dims = ()  # the parallel groups, if its script tells them
    replayable: Name = ""  # "seeded" or "unseeded" where the script said that its work may be done again
    skippable: bool = False  # the script asks which batches to leave out
    grouped_at: Instant = 0.0  # when the last of its ranks had its process group; 0: nobody told
    restoring_at: Instant = 0.0  # when the last of them began to restore its state
    restored_at: Instant = 0.0  # and when the last had it
    restored: Number = -1  # the step of that state, by their Checkpointers; -1: nobody told, or they differ
    set_up_at: Instant = 0.0  # until when one was seen to set itself up, before its training loop; 0: nobody knows
    skipped: Number = 0  # batches that each rank has left out in this generation
    skipped_samples: Number = 0  # in these, of all ranks of the node, as far as they could be counted
    tokens: Real = 0.0  # that the steps of this generation took on all ranks of the job; 0: the script does not tell
    flops: Real = 0.0  # and floating-point operations
    parameters: Number = 0  # that each rank's optimizers train; 0: not known, or the ranks differ
    peak_flops: Real = 0.0  # FLOP/s that the GPUs of the node's ranks can make at most; 0: not known
    tensor_share: Real | None = None  # of the time that its GPUs' tensor cores worked lately; None: not known
    running: Number = -1  # ranks of this generation that live here; -1: it does not say
    strains: tuple[Strain, ...] = ()  # of the machine, if this node reads for it
    links_read: bool = True  # the strains tell of links; a new agent has not read them yet
    parted: bool = False  # every rank's script has left its process groups or returned
    mute: tuple[Number, ...] = ()  # ranks that tell of no step, while others here have made several
    last_at: Instant = 0.0  # when the furthest of its ranks reached its own newest step; 0: as `at`
    survives: bool = False  # each of its ranks can go on in its process when another one fails
    resizes: bool = False  # and among more or fewer ranks, with the same batch
    carries: bool = False  # the job's state lives in the ranks, and those that survive bring it to the others
    replicated: bool = False  # every rank, of several, has the whole state


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """What a node wrote to disk before it left, after it had lost its controller."""

    node: str
    generation: int  # newest that was launched there
    at: float  # by the controller's time; 0: it did not know that
    reason: str
    ended: bool  # all its ranks had ended well
    beat: Beat | None = None  # the last of that generation; None: it did not know the controller's time


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """A number that a source has read from a machine."""

    name: str  # such as gpu.ecc_uncorrected
    of: str  # what it was read of: "GPU 3", "eth0", "/scratch"
    value: float
    at: float


class LinkTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic on one link of a machine, on average since the last reading."""

    link: str  # "eth0", "mlx5_0 port 1"
    rdma: bool
    in_bytes_s: Real
    out_bytes_s: Real
    signs: dict[str, Real] = {}  # RoCE's counters of trouble and congestion, per second


class Reach(msgspec.Struct, frozen=True, kw_only=True, tag="reach"):
    """Which other nodes a node could connect to."""

    node: str
    reached: tuple[str, ...]
    missed: tuple[str, ...]
    gateway: bool | None = None  # whether its gateway answers; None: it has none, or cannot tell


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One log line, written by the kernel or by a rank."""

    text: str
    at: float
    rank: int = -1  # -1: the kernel
    generation: int = 0  # of the rank
