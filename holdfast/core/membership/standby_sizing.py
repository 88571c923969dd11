"""How many standbys are enough in 99 of 100 replacement periods, if nodes are lost one by one, in groups, or with a
switch."""

from collections.abc import Iterator, Sequence
from math import exp, lgamma, log, log1p, sqrt

import msgspec

_MUCH = 1e200  # a float holds little more
_NONE = -1200.0  # not even _MUCH times what has this logarithm is above 0


class LossRates(msgspec.Struct, frozen=True, kw_only=True):
    """A job's mean losses in one period. A period is the time that it takes to replace a used standby."""

    nodes: int
    p: float  # that a node fails within a period
    group: int = 1  # nodes that are evicted together where stacks name a group
    group_share: float = 0.0  # of all incidents
    blasts: tuple[tuple[float, int], ...] = ()  # switches and the like: how many a period, and nodes behind each


class StandbySizing(msgspec.Struct, frozen=True, kw_only=True):
    """The number of standbys needed for one confidence level."""

    plain: int  # of the binomial distribution: every node by itself
    ours: int  # with groups and switches
    short: float  # how often the plain number would not do, with groups and switches


def binomial_quantile(nodes: int, p: float, confidence: float = 0.99) -> int:
    """Return how many of the nodes are lost at most, with this confidence."""
    if not 0 < p < 1:
        return nodes if p >= 1 else 0
    total, mean = 0.0, nodes * p
    least = max(0, int(mean - 40 * sqrt(mean)))  # below that there is nothing that a float could hold
    for count in range(least, nodes + 1):
        # By logarithms: the number of ways to lose a hundred of 16,384 nodes is beyond what a float holds.
        ways = lgamma(nodes + 1) - lgamma(count + 1) - lgamma(nodes - count + 1)
        total += exp(ways + count * log(p) + (nodes - count) * log1p(-p))
        if total >= confidence:
            return count
    return nodes


def size_standbys(losses: LossRates, confidence: float = 0.99) -> StandbySizing:
    """Return how many standbys are enough at this confidence, under two assumptions. `plain` assumes that nodes are
    lost only one by one. `ours` assumes that whole groups, and nodes behind one switch, are lost as well. `short` is
    the chance that `plain` standbys are too few under the second assumption. Kinds of losses count as independent."""
    rate = losses.nodes * losses.p
    kinds = ((rate * (1 - losses.group_share), 1), (rate * losses.group_share, losses.group), *losses.blasts)
    plain, ours = binomial_quantile(losses.nodes, losses.p, confidence), -1
    total = held = 0.0
    for count, chance in enumerate(loss_distribution(kinds, losses.nodes)):
        total += chance
        if count == plain:
            held = total
        if ours < 0 and total >= confidence:
            ours = count
        if ours >= 0 and count >= plain:
            break
    return StandbySizing(plain=plain, ours=ours if ours >= 0 else losses.nodes, short=max(0.0, 1.0 - held))


def loss_distribution(kinds: Sequence[tuple[float, int]], most: int) -> Iterator[float]:
    """Yield the chances of losing exactly 0, 1, 2, ... nodes, and last the chance of losing all `most` nodes. Each of
    `kinds` is a mean number of events and the number of nodes lost in each event. The chances come from Panjer's
    recursion. Its values start at 1, and are scaled down whenever one grows too large for a float."""
    weights = [(mean * each, each) for mean, each in kinds if mean]
    scale = -sum(weight / each for weight, each in weights)  # logarithm of what the newest are to be multiplied by
    found, smaller_at, older_at, seen = [1.0], 0, 0, exp(scale)
    yield seen
    for count in range(1, most):
        value = 0.0
        for weight, each in weights:
            place = count - each
            if place >= smaller_at:
                value += weight * found[place]
            elif place >= older_at:  # what is older adds nothing
                value += weight * found[place] / _MUCH
        value /= count
        if value > _MUCH:
            value, scale = value / _MUCH, scale + log(_MUCH)
            smaller_at, older_at = count, smaller_at
        found.append(value)
        chance = exp(scale + log(value)) if value and scale > _NONE else 0.0
        seen += chance
        yield chance
    yield max(0.0, 1.0 - seen)
