"""Choice of the nodes that keep each node's copies: one peer, or with `backup.copies=2` two of them.

No two of a node and its two keepers are evicted together, where that is possible. Where it is not, the first keeper is
the peer of a single copy, and the second one is as far from both as the groups allow.
"""

from collections import Counter
from collections.abc import Iterator

from holdfast.core.snapshots.node_triples import LEAST_NODES, place_triples
from holdfast.core.snapshots.peer_placement import (
    Groups,
    choose_peers,
    dense_mesh,
    evicted_together,
    find_exposures,
    match_owners,
    parallel_groups,
    place_groups,
    regular_shift,
)
from holdfast.model.job_and_seats import Dims, Seat, world_size

_Two = tuple[tuple[int, ...], tuple[int, ...]]  # by node: its first keeper; its second one
MOST_COPIES = 2
Keepers = dict[str, tuple[str, ...]]  # of each node's copies, in the order in which it sends to them


def choose_keepers(seats: tuple[Seat, ...], mesh: Dims, copies: int) -> tuple[Keepers, tuple[str, ...]]:
    """Return the keepers of each node's copies. The sentences tell of evictions that take a state with all its copies,
    and of copies that cannot be kept."""
    if copies < MOST_COPIES or len(seats) < LEAST_NODES:
        peers, exposed = choose_peers(seats, mesh)
        fewer = (f"backup.copies: two copies take {LEAST_NODES} nodes, so one is kept",)
        told = (*fewer, *exposed) if copies >= MOST_COPIES and len(seats) > 1 else exposed
        return {node: (peer,) for node, peer in peers.items()}, told
    nproc, groups = seats[0].nproc, parallel_groups(dense_mesh(seats, mesh))
    if any(seat.nproc != nproc for seat in seats):  # as with one peer, a neighbour is as good as another
        return {seat.node: (seats[at - 1].node, seats[at - 2].node) for at, seat in enumerate(seats)}, ()
    places = (*groups, *place_groups(seats))
    first, second = _choose_safe([places, groups], _place_two(seats, mesh, places, groups), len(seats), nproc)
    kept: Keepers = {seat.node: (seats[first[at]].node, seats[second[at]].node) for at, seat in enumerate(seats)}
    return kept, find_exposures(len(seats), nproc, groups, first, second)


def _choose_safe(dangers: list[Groups], placements: Iterator[_Two], nodes: int, nproc: int) -> _Two:
    """Return the first placement that survives all of the first dangers, or else of the second, or else the first."""
    found: list[_Two] = []
    for two in placements:
        if not find_exposures(nodes, nproc, dangers[0], *two):
            return two
        found.append(two)
    return next((two for two in found if not find_exposures(nodes, nproc, dangers[1], *two)), found[0])


def _place_two(seats: tuple[Seat, ...], mesh: Dims, places: Groups, groups: Groups) -> Iterator[_Two]:
    """Yield placements, the best first: the first keeper of every node, and the second one."""
    nodes, nproc, world = len(seats), seats[0].nproc, world_size(seats)
    for near in (places, groups):
        if triples := place_triples(world, nproc, near):
            yield triples.first, triples.second
    number, peers = {seat.node: at for at, seat in enumerate(seats)}, choose_peers(seats, mesh)[0]
    first = tuple(number[peers[seat.node]] for seat in seats)
    shared = [evicted_together(nodes, nproc, near) for near in (places, groups)]
    yield first, _second_keepers(first, *shared)


def _second_keepers(
    first: tuple[int, ...], near: tuple[frozenset[int], ...], shared: tuple[frozenset[int], ...]
) -> tuple[int, ...]:
    """Return a second keeper for every node. It is outside the places and groups (`near`), or at least outside the
    groups (`shared`) of the node where it can be, and keeps no more than others do where that leaves a choice."""
    nodes = len(first)
    taken = [frozenset({node, keeper}) for node, keeper in enumerate(first)]
    if regular := regular_shift(nodes, [one | own for one, own in zip(near, taken, strict=True)]):
        return regular
    ways = ([one | own, other | own, own] for one, other, own in zip(near, shared, taken, strict=True))
    barred = [next(out for out in way if len(out) < nodes) for way in ways]
    chosen = match_owners(nodes, barred)
    kept = Counter(first) + Counter(chosen.values())
    for owner in [node for node in range(nodes) if node not in chosen]:
        chosen[owner] = min((n for n in range(nodes) if n not in barred[owner]), key=lambda n: (kept[n], n))
        kept[chosen[owner]] += 1
    return tuple(chosen[node] for node in range(nodes))
