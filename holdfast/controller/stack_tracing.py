"""Asks all nodes at once for the stacks of their processes, and waits until the deadline at most."""

import asyncio
import contextlib
from collections.abc import Callable

from holdfast.controller.node_links import NodeLinks
from holdfast.model.rank_traces import Trace
from holdfast.wire.agent_messages import TraceAnswer, TraceRequest

NOT_CONNECTED = "the node is not connected"
_ROAD_S = 1.0  # for question and answer, besides the looking


class StackTracing:
    def __init__(self, links: NodeLinks, now: Callable[[], float]) -> None:
        self._links = links
        self._now = now
        self._newest = 0
        self._open: dict[int, _Round] = {}

    async def take_traces(
        self, deadline_s: float, native: bool = False, nodes: tuple[str, ...] | None = None
    ) -> tuple[Trace, ...]:
        """Return the stacks of each of `nodes`, or of all linked nodes. A node without an answer gets an error."""
        wanted = self._links.linked_nodes if nodes is None else nodes
        self._newest += 1
        look = TraceRequest(id=self._newest, deadline_s=deadline_s, native=native)
        round = self._open[look.id] = _Round(wanted)
        try:
            for node in wanted:
                if not self._links.send_message(node, look):
                    round.add_trace(Trace(node=node, at=self._now(), error=NOT_CONNECTED))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s + _ROAD_S):
                    await round.complete.wait()
        finally:
            del self._open[look.id]
        late = f"no answer within {deadline_s + _ROAD_S:g} s"
        return tuple(round.traces.get(node) or Trace(node=node, at=self._now(), error=late) for node in wanted)

    def on_trace(self, node: str, looked: TraceAnswer) -> None:
        """Add a node's answer to the round that asked for it. Drop late answers, and answers about another node."""
        round = self._open.get(looked.id)
        if round is not None and looked.trace.node == node:
            round.add_trace(looked.trace)


class _Round:
    """One request for stacks to many nodes, and the answers so far."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.traces: dict[str, Trace] = {}
        self.complete = asyncio.Event()
        self._left = set(nodes)
        if not nodes:
            self.complete.set()

    def add_trace(self, trace: Trace) -> None:
        if trace.node in self._left:
            self._left.discard(trace.node)
            self.traces[trace.node] = trace
        if not self._left:
            self.complete.set()
