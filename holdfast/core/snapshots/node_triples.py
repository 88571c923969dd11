"""Placement of nodes in threes: for every node two others, such that no two of the three are evicted together.

Parity takes the two as the owners of the halves that the node keeps; two copies take them as the node's keepers.
"""

from collections.abc import Iterator

import msgspec

from holdfast.core.snapshots.peer_placement import Groups, evicted_together, match_owners

LEAST_NODES = 3
_TRIES = 16  # ways to deal the first nodes, where no regular one fits both


class NodeTriples(msgspec.Struct, frozen=True, kw_only=True):
    """Two others for every node, indexed by its number. Every node is once a first and once a second one."""

    first: tuple[int, ...]
    second: tuple[int, ...]


def place_triples(world: int, nproc: int, groups: Groups) -> NodeTriples | None:
    """Choose two others for every node. Return None if there is no such choice."""
    nodes = world // nproc
    if nodes < LEAST_NODES:
        return None
    shared = evicted_together(nodes, nproc, groups)
    safe = [s for s in range(1, nodes) if all((n + s) % nodes not in shared[n] for n in range(nodes))]
    fits = frozenset(safe)
    for one, two in _shift_pairs(nodes, safe):
        if (two - one) % nodes in fits:
            return NodeTriples(first=_shift_nodes(nodes, one), second=_shift_nodes(nodes, two))
    for first in _first_placements(nodes, safe, shared):
        barred = [shared[node] | shared[other] for node, other in enumerate(first)]
        second = match_owners(nodes, barred)
        if len(second) == nodes:
            return NodeTriples(first=first, second=tuple(second[node] for node in range(nodes)))
    return None


def _shift_pairs(nodes: int, safe: list[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of shifts to try: first opposite shifts, beginning with those nearest to a third of all nodes, then
    all other pairs. A shift by a third makes groups of three nodes that depend only on one another."""
    yield from ((shift, nodes - shift) for shift in sorted(safe, key=lambda s: abs(3 * s - nodes)))
    yield from ((one, two) for one in safe for two in safe if one < two)


def _shift_nodes(nodes: int, shift: int) -> tuple[int, ...]:
    return tuple((node + shift) % nodes for node in range(nodes))


def _first_placements(nodes: int, safe: list[int], shared: tuple[frozenset[int], ...]) -> Iterator[tuple[int, ...]]:
    yield from (_shift_nodes(nodes, shift) for shift in safe[:_TRIES])
    found = match_owners(nodes, shared)
    if len(found) == nodes:
        yield tuple(found[node] for node in range(nodes))
