"""The wait for links that several machines have lost together, as part of the job's state."""

from collections.abc import Iterable, Set

_REST_S = 90.0  # once some links are back the others have so long: machines read theirs twice within a minute


class LostLinks:
    """The nodes whose links are down because of a switch, and until when the job waits for them."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self.until = 0.0  # 0: nothing is waited for

    def begin_wait(self, now: float, nodes: Iterable[str], wait_s: float) -> None:
        self.nodes.update(nodes)
        if self.nodes:
            self.until = self.until or now + wait_s

    def on_back(self, now: float, nodes: Iterable[str]) -> list[str]:
        """Take in that links are up again. Return of which nodes that is news."""
        back = sorted(self.nodes.intersection(nodes))
        if back:
            self.until = min(self.until, now + _REST_S)
        self.forget_nodes(back)
        return back

    def forget_nodes(self, nodes: Iterable[str]) -> None:
        """Stop waiting for nodes that are back or have left."""
        self.nodes.difference_update(nodes)
        if not self.nodes:
            self.until = 0.0

    def blocks_launch(self, now: float, active: Set[str]) -> bool:
        """Return whether a node that is to get ranks has no link yet, and there is still time for it."""
        return now < self.until and not self.nodes.isdisjoint(active)

    def take_late(self, now: float) -> set[str]:
        """Return the nodes whose links have not come back in time, and wait for them no longer."""
        if not self.until or now < self.until:
            return set()
        late, self.nodes, self.until = self.nodes, set(), 0.0
        return late

    def describe_wait(self, now: float, active: Set[str]) -> str:
        where = ", ".join(sorted(self.nodes & active))
        return f"waiting for the links of {where}, for another {self.until - now:.0f} s at most"
