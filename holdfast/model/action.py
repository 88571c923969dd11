"""Actions that the decider requests. Each has an id, is safe to repeat and gets an outcome, except for Say."""

from enum import StrEnum

import msgspec

from holdfast.model.code_release import Release
from holdfast.model.job_and_seats import HostIdentity, Seat
from holdfast.model.loss_response import Ease, Skip
from holdfast.model.state_doubt import Doubt


class Acquire(msgspec.Struct, frozen=True, kw_only=True, tag="acquire"):
    """Ask the fleet for this many more nodes."""

    id: int
    count: int


class Dismissal(StrEnum):
    """Why a node is given back; the fleet uses the reason to decide whether to avoid the node's host."""

    UNTOLD = ""  # as in journals of older versions
    EVICTED = "evicted"  # its machine is in doubt: no other node should follow there
    LATE = "late"  # it was given a machine and never reported
    GONE = "gone"  # the fleet itself has ended it, and not because of its machine
    DRAINED = "drained"  # a person or the fleet wants it gone, and nothing is wrong with it
    SPARE = "spare"  # it is sound, and others have its place
    REFUSED = "refused"  # it may not join
    ENDED = "ended"  # the job is over


class Dismiss(msgspec.Struct, frozen=True, kw_only=True, tag="dismiss"):
    """Give a node back to the fleet; the fleet ends the node's processes."""

    id: int
    node: str
    reason: str
    code: int = 1  # with which the node exits
    cause: Dismissal = Dismissal.UNTOLD


class Block(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """Put a host on the list of blocked hosts, because its machine is at fault. Nothing waits for the outcome."""

    id: int
    host: str
    identity: HostIdentity
    reason: str
    incident: int  # 0: none, as for a standby


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    """Open a store for the generation and start all of its ranks."""

    id: int
    generation: int
    seats: tuple[Seat, ...]
    doubts: tuple[Doubt, ...] = ()  # of states on storage
    not_after: int | None = None  # of states in memory
    verified: bool = False  # only such as were found good some steps later
    astray: tuple[str, ...] = ()  # seated nodes whose states in memory may be of a line that was left
    release: Release = Release(number=0)
    skips: tuple[Skip, ...] = ()
    eases: tuple[Ease, ...] = ()
    keep: bool = False  # ranks that are parked go on in their processes, and only the other seats get new ones
    resizes: bool = False  # the whole state is on every rank: one of another number of ranks will do
    carries: bool = False  # ranks that are kept bring the state to the others: they are kept with none to restore
    from_zero: bool = False  # it may begin at step 0 if all states are in doubt


class HandOver(msgspec.Struct, frozen=True):
    """Before ranks park: finish the step, and give to others what only the ranks that are about to leave hold; or to
    storage, if all leave."""

    leaving: tuple[int, ...]  # ranks on nodes that leave; (): all, as the job ends
    within_s: float  # then ranks leave the step that they are in, as after a failure


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End all ranks of the generation on these nodes. With `park_s`, ranks may park within this time instead; those
    that do not are ended."""

    id: int
    generation: int
    nodes: tuple[str, ...]
    grace_s: float
    park_s: float = 0.0  # for ranks to park themselves; those that have not by then are ended; 0: all are
    parking: int = 0  # how many ranks are told to, so that people can be
    standing: tuple[int, ...] = ()  # ranks that hang: they could not park themselves, and are ended at once
    hand_over: HandOver | None = None  # the end of a node is known ahead, and the state lives in the ranks


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """Bring a release to these nodes beside the running one; the first node checks it before the others get it.

    The outcome is ok if every node has the release. If the check failed, `detail` says why and `failed` is empty.
    """

    id: int
    release: Release
    nodes: tuple[str, ...]


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Test these nodes while no rank runs on them: each alone and, if none fails, in pairs.

    The outcome is ok if all nodes could be tested. `failed` names bad nodes. `nodes` names a set of nodes of which one
    is bad, but the probe could not find out which.
    """

    id: int
    generation: int  # that ran before, and whose store is there to meet at
    nodes: tuple[str, ...]
    level: int
    least: float = 0.0  # part by which something must be slower than elsewhere to count; 0: by what stands out of noise


class Replay(msgspec.Struct, frozen=True, kw_only=True, tag="replay"):
    """Have groups of these nodes do the job's own work again, to find the one that does it wrong.

    The outcome has the same form as that of Probe.
    """

    id: int
    generation: int
    seats: tuple[Seat, ...]
    not_after: int = -1  # the newest state that is not in doubt; -1: whichever is newest


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """End the job: stop all ranks, write the newest state to storage, give back all nodes, exit with this code."""

    id: int
    code: int
    grace_s: float
    reason: str
    last_s: float = 0.0  # for ranks to end and for storage to take the state; 0: it is not asked to
    not_after: int | None = None  # later states are doubted
    verified: bool = False  # and so are those that were not found good some steps later
    hand_over: HandOver | None = None  # the state lives in the ranks, which may write it to storage themselves


class Say(msgspec.Struct, frozen=True, kw_only=True, tag="say"):
    """One sentence for the person at the console; it has no outcome."""

    text: str
    standbys: tuple[str, ...] = ()  # that it says are lost
    until: float = 0.0  # by when what it says ends at the latest; 0: it tells of no end


Action = Acquire | Dismiss | Block | Launch | Stop | Stage | Probe | Replay | Finish | Say
