"""A fence that blocks the next launch until ranks that could not be stopped are known to have ended."""

from collections.abc import Iterable

from holdfast.core.rank_ranges import format_nodes
from holdfast.model.action import Action, Dismiss, Say


class Fence:
    """Part of the job's state: the nodes that may still run ranks of an old generation.

    The fence is up after a stop that no node confirmed. If any node confirmed the stop, the old generation cannot make
    a step, because every step takes all ranks.
    """

    def __init__(self, lasts_s: float = 0.0, *, fleet_ends: bool = True) -> None:
        """The fence stays up for `lasts_s` seconds, which is how long ranks may run without a controller. Old journals
        have 0, which means no fence. `fleet_ends` says that the fleet can end nodes that do not answer."""
        self.nodes: set[str] = set()  # that may have living ranks, and nobody knows
        self.until = 0.0  # 0: it does not stand
        self._lasts_s = lasts_s
        self._fleet_ends = fleet_ends  # it can end nodes that do not listen, and knows when they are gone
        self._dismissed: dict[int, str] = {}

    def raise_fence(self, now: float, nodes: Iterable[str]) -> list[Action]:
        """Block launches until these nodes are known to run no rank, or until the fence's time is over. If the fleet
        cannot end nodes, return a message to a person; otherwise return nothing."""
        self.nodes.update(nodes)
        if not self.nodes or not self._lasts_s:
            return []
        self.until = now + self._lasts_s
        return [] if self._fleet_ends else [Say(text=f"{self.describe_wait(now)}; {_SOONER}", until=self.until)]

    def blocks_launch(self, now: float) -> bool:
        """Return whether the fence still forbids a launch. A fence whose time is over is dropped."""
        if now >= self.until:
            self._drop_fence()
        return bool(self.until)

    def describe_wait(self, now: float) -> str:
        where = format_nodes(sorted(self.nodes))
        left_s = self.until - now
        return f"waiting out {left_s:.0f} s until the ranks on {where}, which did not answer, have ended themselves"

    def watch_dismissals(self, actions: Iterable[Action]) -> None:
        """Remember the actions by which the fleet ends fenced nodes. Their outcomes may allow the launch."""
        if self.until and self._fleet_ends:
            found = (action for action in actions if isinstance(action, Dismiss) and action.node in self.nodes)
            self._dismissed |= {action.id: action.node for action in found}

    def awaits_outcome(self, action: int) -> bool:
        return action in self._dismissed

    def on_dismissed(self, now: float, action: int, error: str) -> tuple[str, list[Action]]:
        """Note that the fleet has ended a node, so that the node no longer blocks the launch. If the fleet failed to
        end it, the fence stays up until its time is over."""
        node = self._dismissed.pop(action)
        if error:
            told = f"{node} could not be ended: {error}"
            return told, [Say(text=f"{told}; {self.describe_wait(now)}; {_SOONER}", until=self.until)]
        self.note_empty(node)
        return f"{node} is gone", []

    def note_empty(self, node: str) -> bool:
        """Record that no rank lives on this node. Return True if the fence has come down because of this."""
        stood = bool(self.until)
        self.nodes.discard(node)
        if not self.nodes:
            self._drop_fence()
        return stood and not self.until

    def _drop_fence(self) -> None:
        self.until = 0.0
        self.nodes.clear()
        self._dismissed.clear()


_SOONER = "if a node is dead, holdfast evict NODE ends the wait"
