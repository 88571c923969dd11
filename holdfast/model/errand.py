"""What a controller asks of one node, and the node's answer: the node's share of an action, under the action's id."""

import msgspec

from holdfast.model.copy import Aim, Copy, Restore
from holdfast.model.topology import Seat


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
    restore: Restore = Restore()  # of this node's ranks
    aim: Aim = Aim(generation=0)


class StopHere(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the ranks of this generation and of every older one."""

    id: int
    generation: int
    grace_s: float


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The job needs this node no more: end everything and exit with this code."""

    id: int
    code: int
    grace_s: float
    reason: str


Errand = LaunchHere | StopHere | Leave


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """What became of an errand."""

    id: int
    node: str
    ok: bool
    detail: str = ""
    copies: tuple[Copy, ...] = ()  # after a stop: the snapshots that the node holds
