"""Sends errands to nodes, repeats them for nodes that reconnect, and waits for the answers."""

import asyncio
from collections.abc import Collection

import msgspec

from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.model.node_errands import Done, Errand, LaunchHere, StopHere

_AT_ONCE = 64

SILENT, FELL_SILENT = "it is silent", "it fell silent"  # before its errand was sent, and after


class PendingErrands(msgspec.Struct):
    """The errands of one action, some of which are not answered yet."""

    errands: dict[str, Errand]
    left: set[str]
    failed: dict[str, str]
    answered: asyncio.Event
    answers: dict[str, Done] = {}

    def note_answer(self, node: str, error: str) -> None:
        self.left.discard(node)
        if error:
            self.failed[node] = error
        if not self.left:
            self.answered.set()


class ErrandDispatch:
    def __init__(self, links: NodeLinks, registry: NodeRegistry) -> None:
        self._links = links
        self._registry = registry
        self._waiting: dict[int, PendingErrands] = {}
        self._silent: set[str] = set()
        self._hurried = False
        self._stopping = 0  # generations up to this one are not to be launched any more
        self._changed = asyncio.Event()  # any of this, or a node has linked

    async def send_errands(self, id: int, errands: dict[str, Errand], within_s: float) -> PendingErrands:
        """Send each node its errand, and wait until all have answered or time is up."""
        waiting = self._waiting[id] = PendingErrands(errands, set(errands), {}, asyncio.Event())
        for count, (node, errand) in enumerate(errands.items(), 1):
            if node in self._silent:
                waiting.note_answer(node, SILENT)
            else:
                self._links.send_errand(node, errand)
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)  # thousands of sends must not hold up the loop
        try:
            if waiting.left and not self._hurried:
                async with asyncio.timeout(within_s):
                    await waiting.answered.wait()
        except TimeoutError:
            for node in sorted(waiting.left):
                waiting.failed[node] = f"no answer within {within_s:g} s"
        finally:
            del self._waiting[id]
        return waiting

    async def ask_nodes(self, id: int, errands: dict[str, Errand], within_s: float) -> dict[str, Done]:
        """Send each node its errand; return by node the answers that came in time."""
        return (await self.send_errands(id, errands, within_s)).answers

    async def await_links(self, nodes: Collection[str], generation: int) -> bool:
        """Wait until each of these nodes is linked or silent. Return False if this generation is stopped before."""
        while not self._hurried and generation > self._stopping:
            if all(node in self._silent or self._links.is_linked(node) for node in nodes):
                return True
            self._changed.clear()
            await self._changed.wait()
        return False

    def on_done(self, done: Done) -> None:
        waiting = self._waiting.get(done.id)
        if waiting and done.node in waiting.left:
            if isinstance(waiting.errands[done.node], StopHere):
                self._registry.record_copies(done.node, done.copies)
            waiting.answers[done.node] = done
            waiting.note_answer(done.node, "" if done.ok else done.detail or "no reason given")

    def on_silent(self, node: str) -> None:
        """Stop waiting for a node that has fallen silent."""
        self._silent.add(node)
        self._changed.set()
        for waiting in self._waiting.values():
            if node in waiting.left:
                waiting.note_answer(node, FELL_SILENT)

    def on_relink(self, node: str) -> None:
        """Repeat all unanswered errands of a node that has reconnected."""
        self._silent.discard(node)
        self._changed.set()
        for waiting in self._waiting.values():
            errand = waiting.errands.get(node)
            if errand is None or node not in waiting.left:
                continue
            # A node that has lost its memory remembers the stop, and would launch after it what it has forgotten.
            if not isinstance(errand, LaunchHere) or errand.generation > self._stopping:
                self._links.send_errand(node, errand)

    def on_stop(self, generation: int) -> None:
        """Stop repeating the launch errands of this generation and of earlier ones."""
        self._stopping = max(self._stopping, generation)
        self._changed.set()

    def hurry(self) -> bool:
        """Send errands without waiting for answers from now on. Return True in the first call only."""
        hurried, self._hurried = self._hurried, True
        self._changed.set()
        return not hurried

    def drop_waiting(self) -> None:
        """Stop waiting for answers to errands that were sent."""
        for waiting in self._waiting.values():
            waiting.left.clear()
            waiting.answered.set()
