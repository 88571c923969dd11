"""Faults for a simulated job: drawn from a seed at given rates, or given as a list."""

from collections.abc import Iterator
from random import Random

import msgspec

DAY_S = 86400.0

# How ranks die without anybody's last words being to blame for it: exit code, and what was said.
ENDINGS = (
    (-11, ""),
    (-6, "terminate called after throwing an instance of 'c10::Error'"),
    (-9, ""),
    (1, "RuntimeError: CUDA error: an illegal memory access was encountered"),
)


class RankCrash(msgspec.Struct, frozen=True, kw_only=True, tag="crash"):
    """A rank fails; on a defective node a rank fails again after every launch."""

    node: str = ""  # empty: whichever chance picks among those that are up
    code: int = -11
    said: str = ""
    defective: bool = False


class NodeLoss(msgspec.Struct, frozen=True, kw_only=True, tag="loss"):
    """A node and everything on it is gone."""

    node: str = ""


class NodeCut(msgspec.Struct, frozen=True, kw_only=True, tag="cut"):
    """A node cannot reach the controller for a while; its ranks go on."""

    node: str = ""
    for_s: float = 10.0


SimFault = RankCrash | NodeLoss | NodeCut


class FaultRates(msgspec.Struct, frozen=True, kw_only=True):
    """How often things fail. The defaults fit a well-kept cluster.

    ByteRobust evicted 128 nodes and met 47 other incidents among 1,200 nodes in 90 days.
    """

    loss: float = 0.0012  # per node and day, like the next three
    crash: float = 0.0004
    defect: float = 0.0
    cut: float = 0.0
    fleet_fails: float = 0.0  # chances: that the fleet gives nothing,
    dud: float = 0.01  # that an acquired node never reports,
    launch_fails: float = 0.0  # that a launch fails on one node,
    stop_fails: float = 0.0  # that one node does not get its ranks down


HARSH = FaultRates(
    loss=0.5, crash=2.0, defect=0.3, cut=1.0, fleet_fails=0.2, dud=0.05, launch_fails=0.05, stop_fails=0.02
)  # fmt: skip


def draw_faults(rng: Random, rates: FaultRates, nodes: int, until_s: float) -> Iterator[tuple[float, SimFault]]:
    """Yield faults of all kinds for this many nodes, in order of time."""
    kinds = (("loss", rates.loss), ("crash", rates.crash), ("defect", rates.defect), ("cut", rates.cut))
    per_s = nodes * sum(rate for _, rate in kinds) / DAY_S
    at = 0.0
    while per_s > 0:
        at += rng.expovariate(per_s)
        if at >= until_s:
            return
        (kind,) = rng.choices([kind for kind, _ in kinds], [rate for _, rate in kinds])
        yield at, _draw_fault(rng, kind)


def _draw_fault(rng: Random, kind: str) -> SimFault:
    if kind == "loss":
        return NodeLoss()
    if kind == "cut":
        return NodeCut(for_s=rng.choice((1.0, 5.0, 20.0, 90.0)))
    code, said = rng.choice(ENDINGS)
    return RankCrash(code=code, said=said, defective=kind == "defect")
