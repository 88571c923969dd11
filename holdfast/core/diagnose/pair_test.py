"""Plans the pair test: nodes run in worlds, each a distributed job of two nodes. First the nodes are paired in any
order, then each suspect is paired with a good node.

A bad node fails in every world. A node in a world that passes is good. A node that fails together with a known good
node is bad. The test takes two rounds for any number of nodes, but the second round takes several waves if good nodes
are few. If every world of the first round fails, no node is known to be good. Then the nodes are paired differently, a
bounded number of times. If still nothing passes, nobody can be named.
"""

from collections.abc import Iterable, Sequence

import msgspec

World = tuple[str, ...]  # nodes, in the order of their ranks

_PAIRINGS = 3  # of strangers anew, when nothing passes


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one world: whether it passed, and if not, why."""

    world: World
    ok: bool
    reason: str = ""
    rails: dict[str, str] = {}  # which rails of each node failed, where rails were tested one by one


class PairWave(msgspec.Struct, frozen=True, kw_only=True):
    """Worlds (pairs of nodes) to run now, all at once. No node is in two of them."""

    worlds: tuple[World, ...]


class PairTestResult(msgspec.Struct, frozen=True, kw_only=True):
    bad: dict[str, str] = {}  # node and reason
    unsure: tuple[str, ...] = ()  # it cannot be told who of them is bad
    links: tuple[World, ...] = ()  # failed, though all of its nodes are good: it is what lies between them
    reason: str


def next_wave(nodes: Sequence[str], met: Sequence[PairResult]) -> PairWave | PairTestResult:
    """Return the pairs of nodes to run next, or the result of the test. `met` are the results of all pairs so far."""
    good = {node for one in met if one.ok for node in one.world}
    suspects = [node for node in dict.fromkeys(node for one in met for node in one.world) if node not in good]
    if len(nodes) < 2:
        return PairTestResult(reason="one node alone has nobody to be tried with")
    if not met:
        return PairWave(worlds=_pair_strangers(nodes, 0))
    if not good:
        return _pair_again(nodes, met)
    judged = _failed_with_good(met)
    untried = [node for node in suspects if node not in judged]
    untried += [node for node in nodes if node not in good and node not in suspects]
    if untried:
        partners = [node for node in nodes if node in good]
        return PairWave(worlds=tuple(zip(partners, untried, strict=False)))
    return _make_result(met, good, {node: judged[node] for node in suspects})


def _pair_strangers(nodes: Sequence[str], turn: int) -> tuple[World, ...]:
    """Return pairs of nodes; every turn gives other pairs. If the number of nodes is odd, turn 0 has one group of three
    nodes, and each later turn leaves one node without a partner."""
    if turn == 0:
        half = len(nodes) // 2
        pairs = [(nodes[i], nodes[i + half]) for i in range(half)]
        return tuple([*pairs[:-1], (*pairs[-1], nodes[-1])] if len(nodes) % 2 else pairs)
    # As in a tournament: the first stays, the others go round.
    seats: list[str | None] = [*nodes, None] if len(nodes) % 2 else list(nodes)
    around = seats[1:]
    around = around[turn % len(around) :] + around[: turn % len(around)]
    table = [seats[0], *around]
    opposite = zip(table[: len(table) // 2], reversed(table), strict=False)
    return tuple((one, other) for one, other in opposite if one is not None and other is not None)


def _pair_again(nodes: Sequence[str], met: Sequence[PairResult]) -> PairWave | PairTestResult:
    """Return new pairs while no world has passed or, after too many rounds, a result that is unsure of all nodes."""
    tried = {frozenset(one.world) for one in met}
    turns = (_pair_strangers(nodes, turn) for turn in range(1, max(_PAIRINGS, len(nodes)) + 1))
    fresh = (tuple(w for w in worlds if frozenset(w) not in tried) for worlds in turns)
    worlds = next((worlds for worlds in fresh if worlds), ())
    if worlds and _count_rounds(met) <= _PAIRINGS:
        return PairWave(worlds=worlds)
    why = f"all {len(met)} worlds failed: {met[0].reason}" if met[0].reason else f"all {len(met)} worlds failed"
    return PairTestResult(unsure=tuple(nodes), reason=f"{why}; without a good node nobody can be named")


def _count_rounds(met: Iterable[PairResult]) -> int:
    """Return the number of rounds so far, which is the largest number of results in which one node appears."""
    counts: dict[str, int] = {}
    for one in met:
        for node in one.world:
            counts[node] = counts.get(node, 0) + 1
    return max(counts.values(), default=0)


def _failed_with_good(met: Sequence[PairResult]) -> dict[str, PairResult]:
    """Return the nodes proved bad, each with the failed result that proves it: all other nodes in its world are known
    to be good. If two nodes of a world are not known to be good, the link between them may be bad instead."""
    good: set[str] = set()
    found = {}
    for one in met:
        strange = [node for node in one.world if node not in good]
        if one.ok:
            good.update(one.world)
        elif len(strange) == 1:
            found[strange[0]] = one
    return found


def _make_result(met: Sequence[PairResult], good: set[str], judged: dict[str, PairResult]) -> PairTestResult:
    bad = {}
    for node, last in judged.items():
        others = ", ".join(other for other in last.world if other != node)
        rail = f"rail {last.rails[node]} " if node in last.rails else ""
        bad[node] = f"{rail}failed with {others}, which is good" + (f": {last.reason}" if last.reason else "")
    links = tuple(one.world for one in met if not one.ok and good.issuperset(one.world))
    if bad:
        told = "; ".join(f"{node} {why}" for node, why in bad.items())
    elif links:
        told = f"every node is good; what lies between {' and '.join(links[0])} is not"
    else:
        told = f"all {len(met)} worlds passed"
    return PairTestResult(bad=bad, links=links, reason=told)
