"""Nodes whose links are down, as part of the job's state. The job waits for links that several nodes lost together."""

from collections.abc import Iterable, Set

_REST_S = 90.0  # once some links are back the others have so long: machines read theirs twice within a minute


class LostLinks:
    """The nodes whose links are down. For some the job waits until a given time, because a switch is at fault."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self._awaited: set[str] = set()
        self.until = 0.0  # 0: nothing is waited for

    def on_lost(self, nodes: Iterable[str]) -> list[str]:
        """Record that links of these nodes are down. Return those of the nodes whose links were not down already."""
        lost = sorted(set(nodes) - self.nodes)
        self.nodes.update(lost)
        return lost

    def begin_wait(self, now: float, nodes: Iterable[str], wait_s: float) -> None:
        self._awaited.update(nodes)
        self.nodes |= self._awaited
        if self._awaited:
            self.until = self.until or now + wait_s

    def on_back(self, now: float, nodes: Iterable[str]) -> list[str]:
        """Record that links of these nodes are up again. Return those of the nodes whose links were down."""
        back = sorted(self.nodes.intersection(nodes))
        if self._awaited.intersection(back):
            self.until = min(self.until, now + _REST_S)
        self.forget_nodes(back)
        return back

    def not_awaited(self, now: float) -> Set[str]:
        """Return the nodes without links that the job does not wait for, or no longer waits for."""
        return self.nodes - self._awaited if now < self.until else self.nodes

    def forget_nodes(self, nodes: Iterable[str], kept: Set[str] = frozenset()) -> None:
        """Stop waiting for these nodes, which are back or have left. Links of nodes in `kept` still count as down."""
        gone = set(nodes)
        self._awaited -= gone
        self.nodes -= gone - kept
        if not self._awaited:
            self.until = 0.0

    def blocks_launch(self, now: float, active: Set[str]) -> bool:
        """Return whether the launch must wait, because an active node has no link and the wait is not over."""
        return now < self.until and not self._awaited.isdisjoint(active)

    def take_late(self, now: float) -> set[str]:
        """Stop waiting for links once time is up. Return the nodes whose links have not come back."""
        if not self.until or now < self.until:
            return set()
        late, self._awaited, self.until = self._awaited, set(), 0.0
        return late

    def describe_wait(self, now: float, active: Set[str]) -> str:
        where = ", ".join(sorted(self._awaited & active))
        return f"waiting for the links of {where}, for another {self.until - now:.0f} s at most"
