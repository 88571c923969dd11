"""Chooses which nodes replay together: n groups of m, cut in two ways; groups of different cuts share at most one node.

Of the m * n nodes of the grid, node x is in horizontal group x // m and in vertical group x mod n. With m <= n, a
horizontal and a vertical group share at most one node. So if one group of each phase fails because of one node, that is
the node that they share. With m > n they may share more, and such a plan is refused.

Fewer than m nodes may be left over, outside the grid. They are tested in further groups of m, filled up with nodes of
the grid. A group of another size would do other work and could not be compared.
"""

from collections.abc import Sequence
from math import gcd, prod

import msgspec

from holdfast.model.job_and_seats import Dims

Nodes = tuple[str, ...]
Groups = tuple[tuple[str, Nodes], ...]  # names and nodes

# Replicas of these are whole by themselves. What is sharded (fsdp, dp_shard) or split otherwise needs all its ranks.
DATA_PARALLEL = frozenset(("dp", "ddp", "data", "replicate", "dp_replicate"))


class UnfitError(ValueError):
    """These nodes cannot be replayed in this way; one sentence says why."""


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of both phases. All groups of a wave run at the same time. The waves of a phase follow one another."""

    m: int
    n: int
    first: tuple[Groups, ...]
    second: tuple[Groups, ...]

    @property
    def left_over(self) -> Nodes:
        """Nodes that are in no group of the grid."""
        return tuple(nodes[0] for _, nodes in self.second[1]) if len(self.second) > 1 else ()


def plan_grid(nodes: Sequence[str], m: int, n: int) -> ReplayPlan:
    """Divide nodes into n groups of m for each phase. Raises UnfitError."""
    names, size = tuple(nodes), m * n
    if len(set(names)) != len(names):
        raise UnfitError("a node is named twice")
    if m < 1 or n < 2 or size > len(names):
        raise UnfitError(f"{len(names)} nodes do not make {n} groups of {m}: there must be two groups at least")
    if m > n:
        raise UnfitError(
            f"groups of {m} nodes need at least {m} groups beside one another, and there are {n}: with m > n a faulty"
            f" group of each phase would share up to {-(-m // n)} nodes, so no single one could be named"
        )
    grid, left = names[:size], names[size:]
    if len(left) >= m:
        raise UnfitError(f"{len(left)} nodes would be left over, enough for another group of {m}")
    horizontal = tuple((f"h{a}", grid[a * m : (a + 1) * m]) for a in range(n))
    vertical = tuple((f"v{b}", grid[b::n]) for b in range(n))
    if not left:
        return ReplayPlan(m=m, n=n, first=(horizontal,), second=(vertical,))
    # Of those that fill up nobody is used twice: a group of the first and one of the second phase share nobody else.
    spare, fill = m - len(left), m - 1
    together = (("r", left + grid[:spare]),)
    starts = range(spare, spare + fill * len(left), fill) if fill else (spare,) * len(left)
    alone = tuple(
        (f"s{i}", (node, *grid[at : at + fill])) for i, (node, at) in enumerate(zip(left, starts, strict=True))
    )
    return ReplayPlan(m=m, n=n, first=(horizontal, together), second=(vertical, alone))


def fit_grid(count: int, whole: int = 1) -> tuple[int, int]:
    """Return the best number of nodes in a group, and how many such groups `count` nodes form. Groups hold whole
    replicas of the model, so their size is a multiple of `whole`, the nodes of one replica.

    The best size leaves the fewest nodes over, because leftover nodes have to be replayed in further waves. Among
    equally good sizes, the largest is taken, because large groups are most like the job. Groups of one node are the
    last choice, because they cannot show faults between nodes. Raise UnfitError if no size fits.
    """
    sizes = [m for m in range(whole, count + 1, whole) if m <= count // m]
    wide = [m for m in sizes if m > 1] or sizes
    if count < 2 or not wide:
        raise UnfitError(
            f"{count} nodes, of which {whole} make a whole replica of the model, cannot be cut into at least as many"
            f" groups as a group has nodes: that takes {max(2, whole * whole)}"
        )
    m = min(wide, key=lambda m: (count % m, -m))
    return m, count // m


def nodes_per_replica(mesh: Dims, nproc: int) -> int:
    """Return the smallest number of nodes that together run a whole number of replicas."""
    ranks = prod(size for name, size in mesh if name not in DATA_PARALLEL)
    return ranks // gcd(ranks, nproc)


def shrink_mesh(mesh: Dims, ranks: int) -> Dims:
    """Return the mesh for a group of `ranks` ranks, with only data parallelism resized. Raises UnfitError."""
    kept = prod(size for name, size in mesh if name not in DATA_PARALLEL)
    if not ranks or ranks % kept:
        raise UnfitError(f"{ranks} ranks do not hold whole replicas of {kept}")
    left = ranks // kept
    found = []
    for name, size in mesh:
        if name in DATA_PARALLEL:
            size = gcd(size, left)
            left //= size
        found.append((name, size))
    if left == 1:
        return tuple(found)
    # More than one such dimension, or none, and no way to divide them up: the outermost takes what is left.
    place = next((i for i, (name, _) in enumerate(found) if name in DATA_PARALLEL), None)
    if place is None:
        return (("dp", left), *found)
    name, size = found[place]
    return (*found[:place], (name, size * left), *found[place + 1 :])
