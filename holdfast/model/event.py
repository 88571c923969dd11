"""What the decider hears, and what it answers."""

from enum import StrEnum

import msgspec

from holdfast.model.action import Action
from holdfast.model.alarm import Alarm
from holdfast.model.topology import Job
from holdfast.model.verdict import Record


class Phase(StrEnum):
    """Where the job stands; the middle ones belong to an incident or to the first launch."""

    NEW = "new"
    WAITING = "waiting"  # for nodes
    LAUNCHING = "launching"  # ranks are being started
    STARTING = "starting"  # ranks run, not every one has made a step
    TRAINING = "training"
    STOPPING = "stopping"
    PROBING = "probing"  # no rank runs, and nodes are tried
    ENDING = "ending"
    DONE = "done"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the decider."""

    stop_grace_s: float = 2.0  # SIGTERM to SIGKILL when an incident stops the ranks
    shutdown_grace_s: float = 30.0  # the same when a person stops the job (torchrun's --shutdown-timeout)
    stop_s: float = 20.0  # a node that has not stopped its ranks this long after the grace is evicted
    launch_s: float = 120.0  # a node that has not started its ranks by then is evicted
    ready_s: float = 300.0  # an acquired node that has not reported by then is given back
    wait_s: float = 600.0  # how long to wait for nodes before giving up
    last_call_s: float = 30.0  # with A:B, how long to wait for more than A
    window_s: float = 1800.0  # the same failure again within this window climbs the ladder
    evictions: int = 0  # nodes that may be evicted within an hour on evidence short of proof; 0: a quarter, at least 8
    attempts: int = 3  # restarts after the same failure that lead no further, before a person is asked


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The first event of every journal: with it, a replay needs nothing else."""

    job: Job
    limits: Limits


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A node has passed its checks and can take ranks."""

    node: str
    host: str
    nproc: int
    order: int = 0  # lower numbers get lower ranks in the first generation


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """The job's step: the one that every rank has reached."""

    generation: int
    step: int
    at: float
    first_step: int
    first_at: float
    counted: bool


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """All ranks of a node have ended well."""

    node: str
    generation: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """What became of an action; `failed` names the nodes on which it did not work and why."""

    action: int
    ok: bool
    detail: str = ""
    nodes: tuple[str, ...] = ()  # Acquire: the nodes that will come; Probe: of whom one is bad, and nobody knows who
    failed: dict[str, str] = {}


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """A person's word."""

    verb: str  # "stop"
    who: str
    code: int = 0
    now: bool = False  # without grace


class Tick(msgspec.Struct, frozen=True, kw_only=True, tag="tick"):
    """The time the decider asked to be woken at has come."""


Event = Begin | Ready | Alarm | Progress | Ended | Outcome | Order | Tick


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    actions: tuple[Action, ...] = ()
    wake_at: float | None = None
    reason: str = ""
    phase: Phase = Phase.NEW
    closed: Record | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal."""

    seq: int
    at: float
    event: Event
    decision: Decision
