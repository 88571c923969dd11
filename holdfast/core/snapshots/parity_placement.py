"""Placement of parity: which two nodes' snapshot halves are XORed, and which third node keeps the result.

Every node's share is cut in two. Each node keeps a parity: the first half of a second node XORed with the second half
of a third node. A parity takes half the memory of a whole copy, on every node alike. A lost half is recovered by XORing
the parity with the half that still exists, so no two of the three nodes may be evicted together.
"""

from collections.abc import Iterator

import msgspec

from holdfast.core.snapshots.peer_placement import (
    Groups,
    dense_mesh,
    evicted_together,
    match_owners,
    parallel_groups,
    place_groups,
)
from holdfast.model.job_and_seats import Dims, Seat, world_size
from holdfast.model.state_copy import Half

_LEAST = 3  # nodes
_TRIES = 16  # ways to deal the first halves, where no regular one fits both


class ParityPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """The owners of the two halves that each node keeps, indexed by the keeper's number."""

    first: tuple[int, ...]  # whose first half
    second: tuple[int, ...]  # whose second half


def place_halves(seats: tuple[Seat, ...], mesh: Dims) -> tuple[dict[str, tuple[Half, Half]], str]:
    """Return the two keepers of every node's halves. The text says why there are none if parity is impossible."""
    nproc = seats[0].nproc
    if len(seats) < 2:
        return {}, ""  # there are no copies at all
    if any(seat.nproc != nproc for seat in seats):
        return {}, "backup.parity: nodes have different numbers of ranks, so whole copies are kept"
    if len(seats) < _LEAST:
        return {}, f"backup.parity: it takes {_LEAST} nodes, so whole copies are kept"
    world, groups = world_size(seats), parallel_groups(dense_mesh(seats, mesh))
    apart = place_parity(world, nproc, (*groups, *places)) if (places := place_groups(seats)) else None
    laid = apart or place_parity(world, nproc, groups)
    if laid is None:
        return {}, "backup.parity: too many nodes could be evicted together, so whole copies are kept"
    to_first = {owner: keeper for keeper, owner in enumerate(laid.first)}
    to_second = {owner: keeper for keeper, owner in enumerate(laid.second)}
    found = {}
    for number, seat in enumerate(seats):
        k1, k2 = to_first[number], to_second[number]
        one = Half(keeper=seats[k1].node, beside=seats[laid.second[k1]].first_rank)
        two = Half(keeper=seats[k2].node, beside=seats[laid.first[k2]].first_rank)
        found[seat.node] = (one, two)
    return found, ""


def place_parity(world: int, nproc: int, groups: Groups) -> ParityPlacement | None:
    """Choose for every node the two owners whose halves it keeps. Every half is kept once. Return None if there is no
    such choice."""
    nodes = world // nproc
    if nodes < _LEAST:
        return None
    shared = evicted_together(nodes, nproc, groups)
    safe = [s for s in range(1, nodes) if all((n + s) % nodes not in shared[n] for n in range(nodes))]
    fits = frozenset(safe)
    for one, two in _shift_pairs(nodes, safe):
        if (two - one) % nodes in fits:
            return ParityPlacement(first=_shift_nodes(nodes, one), second=_shift_nodes(nodes, two))
    for first in _first_placements(nodes, safe, shared):
        barred = [shared[keeper] | shared[owner] for keeper, owner in enumerate(first)]
        second = match_owners(nodes, barred)
        if len(second) == nodes:
            return ParityPlacement(first=first, second=tuple(second[keeper] for keeper in range(nodes)))
    return None


def _shift_pairs(nodes: int, safe: list[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of shifts to try: first opposite shifts, beginning with those nearest to a third of all nodes, then
    all other pairs. A shift by a third makes groups of three nodes that keep halves only for one another."""
    yield from ((shift, nodes - shift) for shift in sorted(safe, key=lambda s: abs(3 * s - nodes)))
    yield from ((one, two) for one in safe for two in safe if one < two)


def _shift_nodes(nodes: int, shift: int) -> tuple[int, ...]:
    return tuple((node + shift) % nodes for node in range(nodes))


def _first_placements(nodes: int, safe: list[int], shared: tuple[frozenset[int], ...]) -> Iterator[tuple[int, ...]]:
    yield from (_shift_nodes(nodes, shift) for shift in safe[:_TRIES])
    found = match_owners(nodes, shared)
    if len(found) == nodes:
        yield tuple(found[keeper] for keeper in range(nodes))
