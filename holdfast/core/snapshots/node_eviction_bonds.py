"""Nodes that must not be evicted together, because between them they hold all copies of a rank's state."""

from collections.abc import Collection, Mapping, Sequence

from holdfast.core.snapshots.copy_keepers import choose_keepers
from holdfast.core.snapshots.parity_placement import place_halves
from holdfast.model.job_and_seats import Dims, Seat

Bonds = Mapping[str, Collection[frozenset[str]]]  # for each node the sets whose loss, with its own, would lose a state


def copy_bonds(
    seats: tuple[Seat, ...], mesh: Dims, *, parity: bool, copies: int = 1, lone: bool = False
) -> dict[str, set[frozenset[str]]]:
    """Return, for each node, the sets of other nodes that with it hold all copies of a state: its own or another's.
    With `lone`, any second copy may be missing, so no keeper may leave together with the owner."""
    found: dict[str, set[frozenset[str]]] = {seat.node: set() for seat in seats}
    for together in _holders(seats, mesh, parity, copies, lone):
        for node in together:
            found[node].add(together - {node})
    return found


def _holders(seats: tuple[Seat, ...], mesh: Dims, parity: bool, copies: int, lone: bool) -> list[frozenset[str]]:
    """Return sets of nodes that hold all copies of some state."""
    laid = place_halves(seats, mesh)[0] if parity and seats else {}
    if laid:
        node_of = {seat.first_rank: seat.node for seat in seats}
        return [
            frozenset((node, at)) for node, two in laid.items() for h in two for at in (h.keeper, node_of[h.beside])
        ]
    kept = choose_keepers(seats, mesh, copies)[0]
    if lone:
        return [frozenset((node, keeper)) for node, keepers in kept.items() for keeper in keepers]
    return [frozenset((node, *keepers)) for node, keepers in kept.items()]


def may_leave(nodes: Sequence[str], bonds: Bonds, lost: Collection[str]) -> tuple[str, ...]:
    """Return those of `nodes` that can leave without loss of state after `lost` are gone. Earlier nodes are chosen
    first."""
    gone = set(lost)
    for node in nodes:
        if node in gone or not any(others <= gone for others in bonds.get(node, ())):
            gone.add(node)
    return tuple(sorted(gone.intersection(nodes)))
