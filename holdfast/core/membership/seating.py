"""Seats of the next generation: which node runs which ranks."""

from collections.abc import Iterable, Mapping
from math import gcd, prod

from holdfast.model.action import Probe, Replay
from holdfast.model.decider_events import Ready
from holdfast.model.incident_record import Remedy, Verdict
from holdfast.model.job_and_seats import Dims, Job, Seat

REPLICAS = frozenset({"dp", "ddp", "fsdp", "replicate", "dp_replicate", "dp_shard", "data"})  # names of dimensions


def seat_order_key(ready: Ready) -> tuple[int, str]:
    return ready.order, ready.node


def next_seats(
    job: Job,
    old: tuple[Seat, ...],
    evicted: Iterable[str],
    pool: Mapping[str, Ready],
    *,
    may_shrink: bool,
    mesh: Dims = (),
) -> tuple[Seat, ...] | None:
    """Return the seats for the next generation, or None while nodes are missing.

    A standby takes exactly the seat of the node it replaces, so every surviving rank keeps its number and reductions
    sum in the same order. Only a job that `may_shrink` closes the gaps, and by whole replicas if its `mesh` is known.
    """
    out = set(evicted)
    free = sorted(pool.values(), key=seat_order_key)  # one of them may be evicted and back
    kept: list[tuple[str, int]] = []
    for seat in old:
        if seat.node not in out:
            kept.append((seat.node, seat.nproc))
            continue
        standby = next((r for r in free if r.nproc == seat.nproc), None)
        if standby is None:
            continue
        free.remove(standby)
        kept.append((standby.node, standby.nproc))
    kept += [(standby.node, standby.nproc) for standby in free[: max(0, job.max_nodes - len(kept))]]
    if len(kept) < job.max_nodes:
        unit = growth_unit(mesh, kept[0][1]) if kept else 1
        kept = kept[: len(kept) // unit * unit]
        if not (may_shrink and len(kept) >= max(1, job.min_nodes)):
            return None
    return _number_seats(kept, old)


def replica_ranks(mesh: Dims) -> int:
    """Return how many ranks one replica of the model takes: the product of all dimensions that are not replicas."""
    return prod(size for name, size in mesh if name not in REPLICAS)


def growth_unit(mesh: Dims, nproc: int) -> int:
    """Return by how many nodes of `nproc` ranks a job grows or shrinks: the fewest that hold whole replicas of the
    model; 1 if the mesh is not known."""
    replica = replica_ranks(mesh)
    return replica // gcd(replica, nproc)


def make_probe_or_replay(
    id: int, generation: int, seats: tuple[Seat, ...], verdict: Verdict, not_after: int | None
) -> Probe | Replay:
    """Return the action that tests these nodes while no rank runs: the replay or the probe of the verdict."""
    if verdict.remedy is Remedy.REPLAY:
        return Replay(id=id, generation=generation, seats=seats, not_after=-1 if not_after is None else not_after)
    nodes = tuple(sorted(seat.node for seat in seats))
    return Probe(id=id, generation=generation, nodes=nodes, level=verdict.level, least=verdict.least)


def _number_seats(nodes: list[tuple[str, int]], old: tuple[Seat, ...]) -> tuple[Seat, ...]:
    seats, first = [], 0
    for group_rank, (node, nproc) in enumerate(nodes):
        was = old[group_rank] if group_rank < len(old) else None
        if was is not None and (was.node, was.first_rank, was.nproc) == (node, first, nproc):
            seats.append(was)
        else:
            seats.append(Seat(node=node, group_rank=group_rank, first_rank=first, nproc=nproc))
        first += nproc
    return tuple(seats)
