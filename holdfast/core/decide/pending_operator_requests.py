"""Requests without an answer: who holds the job, what a person must decide, and which nodes must leave."""

from collections.abc import Set

FLEET = "the fleet"  # who wants a node gone, if no person does


class OpenRequests:
    """The open requests of people and of the fleet, as part of the job's state."""

    def __init__(self) -> None:
        self.held = ""  # who wants the job to stand still; "": nobody does
        self.asking = ""  # what a person has to decide; "": nothing
        self.asks_until = 0.0
        self.evicting: dict[str, str] = {}  # nodes that are to leave at once, by who said so
        self.draining: dict[str, str] = {}  # and those that leave when somebody can take their place

    def ask_question(self, question: str, until: float) -> None:
        self.asking, self.asks_until = question, until

    def clear_question(self) -> None:
        self.asking, self.asks_until = "", 0.0

    def on_nodes_left(self, nodes: tuple[str, ...]) -> None:
        """Drop the requests to evict or drain these nodes, which have now left."""
        for node in nodes:
            self.evicting.pop(node, None)
            self.draining.pop(node, None)

    def nodes_to_leave(self, active: Set[str], standbys: int) -> set[str]:
        """Return nodes to leave at the next restart: those to be evicted, and drained ones that standbys replace."""
        gone = {node for node in active if node in self.evicting}
        drained = sorted(node for node in active if node in self.draining and node not in gone)
        return gone.union(drained[: max(0, standbys - len(gone))])

    def drained_nodes(self, nodes: Set[str]) -> set[str]:
        """Return those of the nodes that are drained or taken away by the fleet, and not evicted by a person."""
        return {node for node in nodes if self.evicting.get(node, FLEET) == FLEET}

    def who_wants_gone(self, node: str) -> str:
        """Return who wants this node evicted or drained: a person's name, or "the fleet"; "" if nobody does."""
        return self.evicting.get(node) or self.draining.get(node) or ""
