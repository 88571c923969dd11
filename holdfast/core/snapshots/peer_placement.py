"""Choice of peers: each rank's snapshot is copied to a node that is not evicted together with the rank's own node.

Over-eviction takes all nodes of one parallel group at once. So the copy goes to a node that shares no group with the
owner's node. Evicting any one group that is not the whole job then leaves the owner or the copy.
"""

from collections import deque
from collections.abc import Sequence
from math import prod

import msgspec

from holdfast.model.job_and_seats import Dims, Seat, world_size

Groups = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]  # (dimension, its groups of ranks), ...


class PeerPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """The keeper rank of every rank's copy, and the evictions that this placement does not survive."""

    partner: tuple[int, ...]  # indexed by rank
    exposed: tuple[str, ...] = ()  # one sentence each: groups whose eviction would lose a shard


def parallel_groups(dims: tuple[tuple[str, int], ...]) -> Groups:
    """Return the groups of each dimension in a dense layout; the first dimension varies fastest over ranks."""
    world = 1
    for _, size in dims:
        world *= size
    found, stride = [], 1
    for name, size in dims:
        starts = [r for r in range(world) if (r // stride) % size == 0]
        found.append((name, tuple(tuple(start + stride * i for i in range(size)) for start in starts)))
        stride *= size
    return tuple(found)


def choose_peers(seats: tuple[Seat, ...], mesh: Dims) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the peer that keeps each node's copies, and sentences on evictions that take both a state and its copy."""
    if len(seats) < 2:
        return {}, ()
    world, nproc = world_size(seats), seats[0].nproc
    if any(seat.nproc != nproc for seat in seats):
        # Nodes of different sizes have no regular place in any group; a neighbour is as good as another.
        return {seat.node: seats[number - 1].node for number, seat in enumerate(seats)}, ()
    groups = parallel_groups(dense_mesh(seats, mesh))
    placed = place_copies(world, nproc, (*groups, *place_groups(seats)))
    if placed.exposed:  # groups are evicted more often than places are lost
        placed = place_copies(world, nproc, groups)
    kept_by = [placed.partner[seat.first_rank] // nproc for seat in seats]
    return {seat.node: seats[other].node for seat, other in zip(seats, kept_by, strict=True)}, placed.exposed


def place_groups(seats: tuple[Seat, ...]) -> Groups:
    """Return the groups of ranks whose nodes share a place, such as a switch, and so may be lost together."""
    found: dict[tuple[str, ...], list[int]] = {}
    for seat in seats if any(seat.near for seat in seats) else ():
        found.setdefault(seat.near or (seat.node,), []).extend(seat.ranks)
    return (("place", tuple(tuple(ranks) for ranks in found.values())),) if found else ()


def dense_mesh(seats: tuple[Seat, ...], mesh: Dims) -> Dims:
    """Return the mesh in the order that `parallel_groups` expects; empty if its size does not match the world."""
    return mesh[::-1] if prod(size for _, size in mesh) == world_size(seats) else ()


def place_copies(world: int, nproc: int, groups: Groups) -> PeerPlacement:
    """Choose the node that keeps each node's copies, a different one for each if possible.

    Ranks are dense over nodes, nproc to a node; a rank's copy goes to the same local rank on the keeper node.
    """
    nodes = world // nproc
    if nodes < 2:
        return PeerPlacement(
            partner=tuple(range(world)), exposed=("there is one node only: its loss loses every snapshot",)
        )
    shared = evicted_together(nodes, nproc, groups)
    chosen = regular_shift(nodes, shared) or _match_keepers(nodes, shared)
    partner = tuple(chosen[rank // nproc] * nproc + rank % nproc for rank in range(world))
    return PeerPlacement(partner=partner, exposed=find_exposures(nodes, nproc, groups, chosen))


def find_exposures(nodes: int, nproc: int, groups: Groups, *chosen: tuple[int, ...]) -> tuple[str, ...]:
    """Return a sentence for every group whose eviction would take a node and all keepers of its copies. Each of
    `chosen` has one keeper of every node."""
    found, copies = [], "copy" if len(chosen) == 1 else "copies"
    for name, members in groups:
        for number, ranks in enumerate(members):
            out = {rank // nproc for rank in ranks}
            if len(out) < nodes and any(all(keepers[node] in out for keepers in chosen) for node in out):
                where = f"{name} group {number} (nodes {sorted(out)})"
                found.append(f"evicting {where} would lose a snapshot and its {copies}")
    return tuple(found)


def evicted_together(nodes: int, nproc: int, groups: Groups) -> tuple[frozenset[int], ...]:
    """Return for every node the nodes that could be evicted with it. A group that spans all nodes is never evicted."""
    shared: list[set[int]] = [{node} for node in range(nodes)]
    evictions = ({rank // nproc for rank in ranks} for _, members in groups for ranks in members)
    for together in evictions:
        for node in together if len(together) < nodes else ():
            shared[node] |= together
    return tuple(frozenset(s) for s in shared)


def regular_shift(nodes: int, barred: Sequence[frozenset[int]]) -> tuple[int, ...] | None:
    """Return, by node, the keeper of the node's copies. All keepers are at the same distance, as near to half of all
    nodes as is allowed. Return None if every distance leads some node to a keeper that is barred for it."""
    for shift in sorted(range(1, nodes), key=lambda s: abs(2 * s - nodes)):
        if all((node + shift) % nodes not in barred[node] for node in range(nodes)):
            return tuple((node + shift) % nodes for node in range(nodes))
    return None


def _match_keepers(nodes: int, shared: tuple[frozenset[int], ...]) -> tuple[int, ...]:
    """Return, for every node, the peer that keeps its copies.

    Some nodes may have no peer of their own outside their groups. Such a node shares another node's peer, if that peer
    is outside its groups. Otherwise it takes a peer that still keeps nothing, or its neighbour.
    """
    chosen = match_owners(nodes, shared)
    free = deque(n for n in range(nodes) if n not in chosen.values())
    for owner in range(nodes):
        if owner in chosen:
            continue
        safe = [n for n in range(nodes) if n not in shared[owner]]
        if safe:  # kept twice by somebody rather than in danger
            chosen[owner] = safe[owner % len(safe)]
        else:
            chosen[owner] = next((n for n in free if n != owner), (owner + 1) % nodes)
            if chosen[owner] in free:
                free.remove(chosen[owner])
    return tuple(chosen[node] for node in range(nodes))


def match_owners(nodes: int, barred: Sequence[frozenset[int]]) -> dict[int, int]:
    """Return a largest matching of owners to keepers. A keeper has one owner, for which it is not barred."""
    keeper_of: dict[int, int] = {}  # keeper -> owner
    for owner in range(nodes):
        _augment_matching(owner, nodes, barred, keeper_of)
    return {owner: keeper for keeper, owner in keeper_of.items()}


def _augment_matching(owner: int, nodes: int, barred: Sequence[frozenset[int]], keeper_of: dict[int, int]) -> None:
    """Find a keeper for one more owner. If all allowed keepers are taken, move owners to other keepers along a shortest
    alternating path of the matching. Change nothing if there is no such path."""
    came_from: dict[int, int] = {}  # keeper -> owner who would take it
    queue = deque([owner])
    while queue:
        seeking = queue.popleft()
        for keeper in range(nodes):
            if keeper in barred[seeking] or keeper in came_from:
                continue
            came_from[keeper] = seeking
            if keeper in keeper_of:
                queue.append(keeper_of[keeper])
                continue
            _flip_path(keeper, owner, came_from, keeper_of)
            return


def _flip_path(keeper: int, owner: int, came_from: dict[int, int], keeper_of: dict[int, int]) -> None:
    while True:
        seeking = came_from[keeper]
        before = next((k for k, o in keeper_of.items() if o == seeking), None)
        keeper_of[keeper] = seeking
        if seeking == owner or before is None:
            return
        keeper = before
