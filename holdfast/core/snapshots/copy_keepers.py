"""Choice of the nodes that keep each node's copies: one peer, or with `backup.copies=2` two of them.

No two of a node and its two keepers are evicted together, where that is possible. Where it is not, the first keeper is
the peer of a single copy, and the second one is as far from both as the groups allow.
"""

from collections import Counter

from holdfast.core.snapshots.node_triples import LEAST_NODES, place_triples
from holdfast.core.snapshots.peer_placement import (
    Groups,
    choose_peers,
    dense_mesh,
    evicted_together,
    find_exposures,
    match_owners,
    parallel_groups,
    place_copies,
    place_groups,
    regular_shift,
)
from holdfast.model.job_and_seats import Dims, Seat, world_size

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
    chosen, exposed = _place_two(world_size(seats), nproc, (*groups, *place_groups(seats)))
    if exposed:  # groups are evicted more often than places are lost
        chosen, exposed = _place_two(world_size(seats), nproc, groups)
    return {
        seat.node: (seats[one].node, seats[two].node) for seat, (one, two) in zip(seats, chosen, strict=True)
    }, exposed


def _place_two(world: int, nproc: int, groups: Groups) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """Return both keepers of every node, and a sentence for every eviction that takes all three."""
    nodes = world // nproc
    triples = place_triples(world, nproc, groups)
    if triples:
        return tuple(zip(triples.first, triples.second, strict=True)), ()
    first = tuple(place_copies(world, nproc, groups).partner[node * nproc] // nproc for node in range(nodes))
    second = _second_keepers(first, evicted_together(nodes, nproc, groups))
    return tuple(zip(first, second, strict=True)), find_exposures(nodes, nproc, groups, first, second)


def _second_keepers(first: tuple[int, ...], shared: tuple[frozenset[int], ...]) -> tuple[int, ...]:
    """Return a second keeper for every node. It is outside the node's groups where it can be, and keeps no more than
    others do where that leaves a choice."""
    nodes = len(first)
    taken = [frozenset({node, keeper}) for node, keeper in enumerate(first)]
    for barred in ([shared[node] | shared[keeper] for node, keeper in enumerate(first)], [*map(_unite, shared, taken)]):
        if regular := regular_shift(nodes, barred):
            return regular
    allowed = [near | own if len(near | own) < nodes else own for near, own in zip(shared, taken, strict=True)]
    chosen = match_owners(nodes, allowed)
    kept = Counter(first) + Counter(chosen.values())
    for owner in [node for node in range(nodes) if node not in chosen]:
        chosen[owner] = min((n for n in range(nodes) if n not in allowed[owner]), key=lambda n: (kept[n], n))
        kept[chosen[owner]] += 1
    return tuple(chosen[node] for node in range(nodes))


def _unite(one: frozenset[int], other: frozenset[int]) -> frozenset[int]:
    return one | other
