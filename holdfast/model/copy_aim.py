"""Which snapshots a node must hold for the job, and to which peers it copies them."""

import msgspec

from holdfast.model.job_and_seats import Seat
from holdfast.model.state_copy import Address


class Half(msgspec.Struct, frozen=True, kw_only=True):
    """The keeper of one half of a node's backup. It stores this half XORed with a half of another node's backup."""

    keeper: str
    keeper_at: Address = ("", 0)
    beside: int  # the first rank of the other node


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot steps that a node must hold for the job and copy to its peers."""

    generation: int
    floor: int = -1  # every rank holds it, and so do the peers: not to be given up; -1: there is none yet
    next: int = -1  # the first snapshot from this step on is to become the next floor
    verified: int = -1  # a floor after which training went on well
    peer: str = ""  # the node that keeps the copies; "": nobody does
    peer_at: Address = ("", 0)
    second: str = ""  # another node that keeps them too, with two copies; "": nobody does
    second_at: Address = ("", 0)
    halves: tuple[Half, ...] = ()  # with parity the peer keeps the first of these only
    disk: int = -1  # the floor that every node writes to its disk; -1: none just now
    disk_from: int = -1  # on every disk: older states may be removed there
    wards: tuple[Seat, ...] = ()  # whose copies this node keeps: it takes none from others
