"""Placement of parity: which two nodes' snapshot halves are XORed, and which third node keeps the result.

Every node's share is cut in two. Each node keeps a parity: the first half of a second node XORed with the second half
of a third node. A parity takes half the memory of a whole copy, on every node alike. A lost half is recovered by XORing
the parity with the half that still exists, so no two of the three nodes may be evicted together.
"""

from holdfast.core.snapshots.node_triples import LEAST_NODES, place_triples
from holdfast.core.snapshots.peer_placement import dense_mesh, parallel_groups, place_groups
from holdfast.model.copy_aim import Half
from holdfast.model.job_and_seats import Dims, Seat, world_size


def place_halves(seats: tuple[Seat, ...], mesh: Dims) -> tuple[dict[str, tuple[Half, Half]], str]:
    """Return the two keepers of every node's halves. The text says why there are none if parity is impossible."""
    nproc = seats[0].nproc
    if len(seats) < 2:
        return {}, ""  # there are no copies at all
    if any(seat.nproc != nproc for seat in seats):
        return {}, "backup.parity: nodes have different numbers of ranks, so whole copies are kept"
    if len(seats) < LEAST_NODES:
        return {}, f"backup.parity: it takes {LEAST_NODES} nodes, so whole copies are kept"
    world, groups = world_size(seats), parallel_groups(dense_mesh(seats, mesh))
    apart = place_triples(world, nproc, (*groups, *places)) if (places := place_groups(seats)) else None
    laid = apart or place_triples(world, nproc, groups)
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
