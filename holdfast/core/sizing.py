"""How many standbys to hold: what is lost at once, by nodes, whole groups and whole switches, in 99 of 100 periods."""

from collections.abc import Sequence
from math import exp, lgamma, log, log1p

import msgspec

_ENOUGH = 1e-9  # of a distribution's tail may be left out


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """What a job loses, on average, in one period: the time in which a lost standby is made up for."""

    nodes: int
    p: float  # that a node fails within a period
    group: int = 1  # nodes that are evicted together where stacks name a group
    group_share: float = 0.0  # of all incidents
    blast: int = 0  # nodes behind one switch
    blasts: float = 0.0  # a period


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """Standbys for one confidence."""

    plain: int  # of the binomial distribution: every node by itself
    ours: int  # with groups and switches
    short: float  # how often the plain number would not do, with groups and switches


def binomial(nodes: int, p: float, confidence: float = 0.99) -> int:
    """The least number that is not exceeded with this confidence."""
    if not 0 < p < 1:
        return nodes if p >= 1 else 0
    total = 0.0
    for count in range(nodes + 1):
        # By logarithms: the number of ways to lose a hundred of 16,384 nodes is beyond what a float holds.
        ways = lgamma(nodes + 1) - lgamma(count + 1) - lgamma(nodes - count + 1)
        total += exp(ways + count * log(p) + (nodes - count) * log1p(-p))
        if total >= confidence:
            return count
    return nodes


def size(losses: Losses, confidence: float = 0.99) -> Sizing:
    """Groups and switches come by themselves, so what is lost is a sum of three that know nothing of one another."""
    rate = losses.nodes * losses.p
    lost = poisson(rate * (1 - losses.group_share), 1, losses.nodes)
    lost = added(lost, poisson(rate * losses.group_share, losses.group, losses.nodes), losses.nodes)
    if losses.blast:
        lost = added(lost, poisson(losses.blasts, losses.blast, losses.nodes), losses.nodes)
    plain = binomial(losses.nodes, losses.p, confidence)
    return Sizing(plain=plain, ours=quantile(lost, confidence), short=max(0.0, 1.0 - sum(lost[: plain + 1])))


def poisson(mean: float, each: int, most: int) -> list[float]:
    """The distribution of what so many events on average cost, each so much; beyond `most` all is lost anyway."""
    found = [0.0] * (most + 1)
    chance, seen, count = exp(-mean), 0.0, 0
    while seen < 1 - _ENOUGH and count <= most:
        found[min(most, count * each)] += chance
        seen += chance
        count += 1
        chance *= mean / count
    return found


def added(one: Sequence[float], other: Sequence[float], most: int) -> list[float]:
    """The distribution of a sum."""
    found = [0.0] * (most + 1)
    few = [(at, chance) for at, chance in enumerate(other) if chance]
    for here, chance in enumerate(one):
        if not chance:
            continue
        for at, also in few:
            found[min(most, here + at)] += chance * also
    return found


def quantile(chances: Sequence[float], confidence: float) -> int:
    total = 0.0
    for count, chance in enumerate(chances):
        total += chance
        if total >= confidence:
            return count
    return len(chances) - 1
