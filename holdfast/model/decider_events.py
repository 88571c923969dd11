"""Events that the decider takes in: news of nodes, ranks and storage, orders of people, and outcomes of actions."""

from typing import Literal

import msgspec

from holdfast.model.code_release import Release
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Alarm
from holdfast.model.fleet_node_reports import FleetReport
from holdfast.model.job_and_seats import Dims, HostIdentity, Job
from holdfast.model.job_phase import Phase
from holdfast.model.message_bounds import Number
from holdfast.model.stored_checkpoint_report import StorageReport


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The first event of every journal; it holds all settings that a rebuild of the decider needs."""

    job: Job
    limits: Limits
    release: Release = Release(number=1)
    started_at: float = 0.0  # when the command that runs the job was started; 0: as this event
    fence_s: float = 0.0  # after this long without a controller no rank lives on any node; 0: not known


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A node has reported: it runs no ranks, and it can take a seat unless its host is blocked."""

    node: str
    host: str
    nproc: int
    order: int = 0  # lower numbers get lower ranks in the first generation
    identity: HostIdentity = HostIdentity()
    blocked: str = ""  # why it is refused, by the list of blocked hosts as it was when the node reported; "": it is not


WARM_STEPS = 10  # after a launch: ranks compile, fill caches and wait for their first batches


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """The newest step that every rank of the job has reached."""

    generation: int
    step: int
    at: float
    first_step: int
    first_at: float
    counted: bool  # since the launch: neither told by the script, nor is it known where that began
    grouped_at: float = 0.0  # when the last rank of this generation had its process group; 0: nobody told
    restoring_at: float = 0.0  # when the last began to restore its state
    restored_at: float = 0.0  # and when the last had it
    restored: int = -1  # the step of that state, by the Checkpointers of all ranks; -1: not known
    set_up_at: float = 0.0  # until when one was seen to set itself up, before its training loop; 0: nobody knows
    skippable: bool = False  # on every rank the script asks which batches to leave out
    skipped: int = 0  # batches that each rank has left out in this generation
    skipped_samples: int = 0  # in these, of all ranks, as far as they could be counted
    backed: bool = False  # every node has copied its state to a peer
    lone: bool = False  # and some of them, of two peers, to one alone
    numbered: bool = False  # not told by the script, but counted by us, and it is known from where on
    parted: bool = False  # every rank's script has left its process groups or returned: it makes no more steps
    tokens: float = 0.0  # that the steps of this generation took; 0: the script does not tell
    flops: float = 0.0  # and floating-point operations
    parameters: int = 0  # of the whole model, where they can be counted; 0: not known
    peak_flops: float = 0.0  # FLOP/s that the GPUs of all ranks can make at most; 0: not known
    loss: float | None = None  # mean of the nodes' newest losses; None: not told, or one of them is not finite
    last_at: float = 0.0  # when a rank made its newest step, if ranks do not step together; 0: they do
    survives: bool = False  # every rank can go on in its process when another one fails
    resizes: bool = False  # and among more or fewer ranks, with the same batch
    carries: bool = False  # the job's state lives in the ranks, and those that survive bring it to the others
    replicated: bool = False  # every rank, of several, has the whole state

    @property
    def is_steady(self) -> bool:
        """Return whether the first steps of the generation, which say nothing about its pace, are over."""
        return self.step >= self.first_step + WARM_STEPS

    @property
    def is_told(self) -> bool:
        """Return whether the script itself reported the step's number."""
        return not self.counted and not self.numbered

    @property
    def mean_step_s(self) -> float:
        """Return the mean time of a step in this generation; 0 until its second step."""
        return max(0.0, self.at - self.first_at) / max(1, self.step - self.first_step)

    def reached_at(self, step: int, before: "Progress | None") -> float:
        """Return the time at which an earlier step was reached, interpolated between the report before and this one."""
        at, done = (before.at, before.step) if before else (self.first_at, self.first_step)
        if self.step <= done:
            return self.at
        return at + (self.at - at) * max(0, step - done) / (self.step - done)

    def renumbers(self, before: "Progress | None") -> bool:
        """Return whether the script now reports its own step numbers, which differ from those counted so far."""
        return before is not None and before.numbered and not self.numbered and self.step < before.step


class SlowTime(msgspec.Struct, frozen=True, kw_only=True, tag="slow_time"):
    """A time in which the job was slower than before, for the report alone. One with the same `since` replaces it."""

    generation: int
    since: float
    until: float  # so far
    cost_s: float  # seconds sooner by which a job as fast as before would have been here
    node: str = ""  # for which the others waited; "": nobody was named

    @property
    def ratio(self) -> float:
        """Return how many times as long steps took, on average."""
        took_s = self.until - self.since
        return took_s / (took_s - self.cost_s) if 0 < self.cost_s < took_s else 1.0


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """All ranks of a node are done: they have exited with code 0, or have finished their scripts and hang at exit."""

    node: str
    generation: Number
    left: tuple[Number, ...] = ()  # who stand
    departed: bool = False  # so the node wrote down before it left, while there was no controller
    reason: str = ""  # what was seen of them


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """The result of an action. `failed` names the nodes on which the action failed, each with the reason."""

    action: int
    ok: bool
    detail: str = ""
    nodes: tuple[str, ...] = ()  # Acquire: the nodes that will come; Probe: of whom one is bad, and nobody knows who
    failed: dict[str, str] = {}
    untested: tuple[str, ...] = ()  # Probe, Replay: who did not answer or could not be tested
    departed: tuple[int, ...] = ()  # Stop: ranks that had ended well before it
    disks: int = 0  # Launch: nodes from whose disks ranks get their states
    apart: str = ""  # Launch: which step was held for which rank, if none was held for all
    refused: bool = False  # Acquire: for good; `detail` is the cluster's own sentence
    storage: StorageReport | None = None  # Finish: after it; None: no node has told of any storage
    kept: int = 0  # Launch: ranks that went on in their processes


OrderVerb = Literal["stop", "update", "rollback", "hold", "resume", "evict", "drain", "approve"]


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """A person's order to a running job."""

    verb: OrderVerb
    who: str
    code: int = 0
    now: bool = False  # stop: without grace; update: without waiting for a restart
    node: str = ""  # evict, drain
    release: Release | None = None  # update: its number is given when it is taken
    number: int = 0  # rollback: to which release; 0: to the newest that worked before
    window_s: float = 0.0  # update: it rides on a restart within this, and after it has one of its own


class MeshReport(msgspec.Struct, frozen=True, kw_only=True, tag="mesh"):
    """The script has reported its parallel groups; those that the user gave with the job take precedence."""

    mesh: Dims


class LinksDown(msgspec.Struct, frozen=True, kw_only=True, tag="links_down"):
    """A link of these nodes' machine is down. The event is not sent if all seats are on these nodes."""

    nodes: tuple[str, ...]


class LinksUp(msgspec.Struct, frozen=True, kw_only=True, tag="links_up"):
    """All links of these nodes, which a LinksDown had named, are up again."""

    nodes: tuple[str, ...]


class Tick(msgspec.Struct, frozen=True, kw_only=True, tag="tick"):
    """Wakes the decider at the time at which it has asked to be woken."""


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A loss of journal entries, with what is still known of the job's state at the time of those entries."""

    kept: int  # entries that are left
    of: int  # that it had, at least; 0: nobody knows
    damaged: bool = False  # or the end is missing
    generation: int = 0  # newest that was launched
    release: int = 0  # of it
    phase: Phase | None = None
    nodes: tuple[str, ...] = ()  # whom it was launched on; none: nobody knows


class Successor(msgspec.Struct, frozen=True, kw_only=True, tag="successor"):
    """A controller has taken over from an earlier one."""

    epoch: int  # lives of controllers in this run, with this one
    lost: Lost | None = None
    alone_since: float = 0.0  # the last sign of life of the controller before; 0: not known
    full_disk: str = ""  # the run directory, if that controller had ended because its disk was full
    full_until: float = 0.0  # and when it had room again


Event = (
    Begin
    | Ready
    | Alarm
    | Progress
    | StorageReport
    | SlowTime
    | Ended
    | Outcome
    | Order
    | MeshReport
    | LinksDown
    | LinksUp
    | FleetReport
    | Tick
    | Successor
)
