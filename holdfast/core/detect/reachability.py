"""Reachability detector: finds nodes that no longer reach others, and says whether a node or the network is down.

Each node tries to reach a few other nodes, and its gateway, every half minute. A node is cut off from another node if
it has reached that node before and now misses it twice in a row. A node that was never reached may be behind a firewall
and proves nothing. Nodes that reach only one another are an island. A single node that is an island may have a bad link
of its own. If several nodes are cut off, the network between them and the other nodes is down, and no node is named.
"""

from collections.abc import Iterator, Mapping, Sequence

from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Reach

MISSES = 2  # in a row: one may be a busy machine
_TRIED = 3  # other nodes by each: its neighbours, and one far away
_SEEN = 16  # nodes in order that are looked through for neighbours on other hosts


def choose_peers(nodes: Sequence[str], hosts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return for each node the peers that it tries to reach: the next two nodes in order, which are often on the same
    switch, and one node far away. Peers on the node's own host are left out."""
    chosen, count = {}, len(nodes)
    for place, node in enumerate(nodes):
        steps = (count // 2, *range(1, min(count, _SEEN)))
        others = dict.fromkeys(nodes[(place + step) % count] for step in steps)
        chosen[node] = tuple(other for other in others if hosts.get(other) != hosts.get(node))[:_TRIED]
    return chosen


class ReachDetector:
    def __init__(self) -> None:
        self._met: set[tuple[str, str]] = set()  # pairs of which one has ever reached the other
        self._misses: dict[tuple[str, str], int] = {}  # in a row, of one node when it tried another
        self._gateways: dict[str, int | None] = {}  # the same of its gateway; None: it has none, or cannot tell
        self._answered: set[str] = set()  # nodes that told of this round; what others told before is out of date
        self._told: tuple[tuple[str, ...], ...] = ()

    def on_launch(self) -> None:
        """Forget which nodes could not be reached, because other nodes may be seated now."""
        self._misses.clear()
        self._gateways.clear()
        self._answered.clear()
        self._told = ()

    def on_reach(self, reach: Reach) -> None:
        self._answered.add(reach.node)
        for peer in reach.reached:
            self._met.add((reach.node, peer))
            self._misses[reach.node, peer] = 0
        for peer in reach.missed:
            if (reach.node, peer) in self._met:
                self._misses[reach.node, peer] = self._misses.get((reach.node, peer), 0) + 1
        before = self._gateways.get(reach.node) or 0
        self._gateways[reach.node] = None if reach.gateway is None else 0 if reach.gateway else before + 1

    def find_islands(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of nodes that are cut off from the largest group; empty if all nodes reach one another. If
        no group is larger than all others, return all groups."""
        tried = {pair: misses for pair, misses in self._misses.items() if pair[0] in self._answered}
        near: dict[str, set[str]] = {node: set() for pair in tried for node in pair}
        for (one, other), misses in tried.items():
            if misses < MISSES:
                near[one].add(other)
                near[other].add(one)
        groups = sorted(_connected_groups(near))
        most = max(map(len, groups), default=0)
        largest = [found for found in groups if len(found) == most]
        rest = largest[0] if len(largest) == 1 else ()  # of two that are equally large none is the rest
        return tuple(found for found in groups if found != rest)

    def check_islands(self, now: float, generation: int, stance: Stance = Stance.NOTIFY) -> Alarm | None:
        """Return an alarm if this round of answers shows that nodes are cut off, unless the last alarm said so."""
        islands = self.find_islands()
        self._answered.clear()
        if islands == self._told:
            return None
        self._told = islands
        if not islands:
            return None
        cut_off = tuple(sorted(node for island in islands for node in island))
        return Alarm(
            kind=Kind.HEALTH,
            at=now,
            suspects=cut_off if len(cut_off) == 1 else (),
            reason=self._describe_islands(islands, cut_off),
            generation=generation,
            klass="peer_connection_lost",
            group="infrastructure",
            signature=f"reach {' '.join(cut_off)}",
            evidence=tuple(
                f"{one} has missed {other} {misses} times"
                for (one, other), misses in sorted(self._misses.items())
                if misses >= MISSES
            )[:16],
            stance=stance,
        )

    def _describe_islands(self, islands: tuple[tuple[str, ...], ...], cut_off: tuple[str, ...]) -> str:
        missed = [self._gateways.get(node) for node in cut_off]
        without = all(misses is not None and misses >= MISSES for misses in missed)
        if len(cut_off) == 1:
            what = "reaches neither its gateway nor a peer" if without else "reaches no peer"
            return f"{what}, and the others reach each other: it may be its own link, or its port of the switch"
        names = f"{', '.join(cut_off[:-1])} and {cut_off[-1]}"
        peer = "a peer" if all(len(island) == 1 for island in islands) else "a node beyond their own group"
        what = f"reach neither their gateway nor {peer}" if without else f"do not reach {peer}"
        return f"{names} {what}: the network between is down"


def _connected_groups(near: Mapping[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Yield groups of nodes that are connected, directly or through others."""
    left = set(near)
    while left:
        found: set[str] = set()
        edge = {next(iter(left))}
        while edge:
            found |= edge
            edge = {other for node in edge for other in near[node]} - found
        left -= found
        yield tuple(sorted(found))
