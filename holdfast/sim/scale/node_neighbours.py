"""Neighbouring nodes: seats side by side share a switch, a rack or a pipeline."""

import msgspec

from holdfast.model.job_and_seats import Seat

_PIPELINE = 8  # nodes: as many as ByteRobust's job of 9,600 GPUs has in a pipeline (section 4)


class FailurePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a failure is, and which nodes and ranks may be blamed for it."""

    node: str
    other: str  # who is named where nobody knows better
    group: tuple[str, ...] = ()  # nodes of its pipeline
    ranks: tuple[int, ...] = ()  # of it and of a neighbour there


def seats_around(seats: tuple[Seat, ...], node: str, count: int) -> tuple[Seat, ...]:
    """Return the node's block of up to `count` consecutive seats; empty if the node has no seat."""
    place = next((number for number, seat in enumerate(seats) if seat.node == node), None)
    if place is None:
        return ()
    first = place // count * count
    return seats[first : first + count]


def find_place(seats: tuple[Seat, ...], node: str, other: str) -> FailurePlace:
    """Return the place of a node's failure: the nodes of its pipeline, and the ranks that may be named if they hang.
    `other` is the node that is named if nobody knows better."""
    group = seats_around(seats, node, _PIPELINE)
    own = [number for number, seat in enumerate(group) if seat.node == node]
    near = {group[number % len(group)].first_rank for place in own for number in (place, place + 1)}
    return FailurePlace(node=node, other=other, group=tuple(seat.node for seat in group), ranks=tuple(sorted(near)))
