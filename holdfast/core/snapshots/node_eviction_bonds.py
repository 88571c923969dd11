"""Nodes that must not be evicted together, because between them they hold all copies of a rank's state."""

from collections.abc import Collection, Mapping, Sequence

from holdfast.core.snapshots.parity_placement import place_halves
from holdfast.core.snapshots.peer_placement import choose_peers
from holdfast.model.job_and_seats import Dims, Seat

Bonds = Mapping[str, Collection[str]]  # for each node the others whose loss, together with its own, would lose a state


def copy_bonds(seats: tuple[Seat, ...], mesh: Dims, *, parity: bool) -> Bonds:
    """Return, for each node, the nodes that keep its copies and the nodes whose copies it keeps."""
    found: dict[str, set[str]] = {seat.node: set() for seat in seats}
    laid = place_halves(seats, mesh)[0] if parity and seats else {}
    if laid:
        node_of = {seat.first_rank: seat.node for seat in seats}
        pairs = [(node, other) for node, two in laid.items() for h in two for other in (h.keeper, node_of[h.beside])]
    else:
        pairs = list(choose_peers(seats, mesh)[0].items())
    for one, other in pairs:
        found[one].add(other)
        found[other].add(one)
    return found


def may_leave(nodes: Sequence[str], bonds: Bonds, lost: Collection[str]) -> tuple[str, ...]:
    """Return those of `nodes` that can leave without loss of state after `lost` are gone. Earlier nodes are chosen
    first."""
    gone = set(lost)
    for node in nodes:
        if node in gone or gone.isdisjoint(bonds.get(node, ())):
            gone.add(node)
    return tuple(sorted(gone.intersection(nodes)))
