"""Errands and their answers: one node's share of an action, sent by the controller under the action's id."""

import msgspec

from holdfast.model.action import HandOver, Stop
from holdfast.model.code_release import Release
from holdfast.model.copy_aim import Aim
from holdfast.model.job_and_seats import Dims, Seat
from holdfast.model.loss_response import Ease, Skip
from holdfast.model.message_bounds import Instant, Number
from holdfast.model.probe_findings import Finding, PairMeeting
from holdfast.model.replay_task import ReplayResult, ReplayTask
from holdfast.model.restore_sources import LaunchOrigin, Restore
from holdfast.model.state_copy import Copy
from holdfast.model.state_doubt import Doubt
from holdfast.model.stored_checkpoint_report import MissedCheckpoint


class LaunchHere(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    id: int
    generation: int
    seat: Seat
    world_size: int
    group_world_size: int
    store_host: str
    store_port: int
    run_id: str
    mark: str = ""  # of the run
    max_restarts: int
    began_at: float = 0.0  # the job; 0: unknown
    made_up: bool = False  # optimizers that the job has saved have counted a step that torch made to create their state
    told: bool = False  # the newest steps of the job had the script's own numbers
    restore: Restore = Restore()  # of this node's ranks
    line: tuple[LaunchOrigin, ...] = ()  # this launch and those before it: tells which states are of its line
    astray: bool = False  # the node was away while others went on: all that it holds is of a line that was left
    aim: Aim = Aim(generation=0)
    release: Release = Release(number=0)
    skips: tuple[Skip, ...] = ()
    eases: tuple[Ease, ...] = ()
    keep: bool = False  # as in Launch
    mesh: Dims = ()  # the parallel groups, as far as they are known


class Parking(msgspec.Struct, frozen=True):
    """How the ranks of a node that is stopped may park."""

    park_s: float
    standing: tuple[int, ...]
    hand_over: HandOver | None

    @property
    def within_s(self) -> float:
        """How long it may take until all have."""
        return self.park_s + (self.hand_over.within_s if self.hand_over else 0.0)


class StopHere(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End or park the ranks of this generation and of every older one."""

    id: int
    generation: int
    grace_s: float
    park_s: float = 0.0  # as in Stop
    standing: tuple[int, ...] = ()
    hand_over: HandOver | None = None

    @classmethod
    def of_action(cls, action: Stop) -> "StopHere":
        shared = {name: getattr(action, name) for name in cls.__struct_fields__}
        return cls(**shared)

    @property
    def parking(self) -> Parking | None:
        return Parking(self.park_s, self.standing, self.hand_over) if self.park_s > 0 else None


class StageHere(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """Stage this release beside the running one. With `check`, then check that it compiles and its imports resolve."""

    id: int
    release: Release
    check: bool = False


class ProbeHere(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Probe this node alone."""

    id: int
    level: int


class PairTestHere(msgspec.Struct, frozen=True, kw_only=True, tag="meet"):
    """Test the links between this node and others, which run the same test at the same time."""

    id: int
    meeting: PairMeeting
    rails: tuple[str, ...] = ()  # of this node, to be tested one by one; empty: none in particular


class ReplayHere(msgspec.Struct, frozen=True, kw_only=True, tag="play"):
    """Do the job's own work again for some steps in a group of nodes, and discard the result."""

    id: int
    launch: LaunchHere  # as the ranks of a job are; only its numbers count, no generation begins
    replay: ReplayTask
    within_s: float


class FinalState(msgspec.Struct, frozen=True, kw_only=True):
    """A step that one node writes from memory to storage before the job ends, with the ranks whose state it writes."""

    step: int
    ranks: tuple[int, ...]
    doubted: bool = False  # written apart: nobody is to go on from it by mistake


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Leave the job: end everything on this node and exit with this code."""

    id: int
    code: int
    grace_s: float
    reason: str
    last: tuple[FinalState, ...] = ()
    last_s: float = 0.0  # for storage to take it
    disk_over: bool = False  # nobody of the job will come back to this host for what lies on its disk
    ended: bool = False  # the job has; else the node alone leaves
    doubts: tuple[Doubt, ...] = ()  # besides those of the launch
    spared: tuple[int, ...] = ()  # ranks of other nodes of this host: their states on its disk are not this node's
    stored: int = -1  # newest step on storage, as far as nodes have reported


Errand = LaunchHere | StopHere | StageHere | ProbeHere | PairTestHere | ReplayHere | Leave


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """A node's answer to an errand, with the result."""

    id: Number
    node: str
    ok: bool
    detail: str = ""
    copies: tuple[Copy, ...] = ()  # after a stop: the snapshots that the node holds; at the end: those on its disk
    departed: tuple[Number, ...] = ()  # and its ranks that had ended well by then
    findings: tuple[Finding, ...] = ()  # of probes
    played: tuple[ReplayResult, ...] = ()  # by ranks of a replay
    refused: bool = False  # a release that did not pass its check: nobody is to have it
    stored: Number = -1  # after a stop or at the end: the newest checkpoint that the node has published
    missed: MissedCheckpoint | None = None  # since then
    stored_at: Instant = 0.0  # when it did, by the controller's time; 0: not known
    kept: Number = 0  # after a launch: ranks that went on in their processes
