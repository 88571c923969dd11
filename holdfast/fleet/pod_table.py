"""The pods of a run as the API server has them: listed once, then kept up to date by a watch."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from typing import Protocol

from holdfast.fleet.pod_manifest import NODE_LABEL
from holdfast.fleet.pod_reading import PodView

_LIST_S = 60.0  # between lists: a link that died silently ends a watch without a word
_SETTLE_S = 0.02  # for what has come to be read
_CATCH_UP_S = 2.0  # for a watch to tell how pods have ended that are not in a list any more

PodChanges = AsyncIterator[tuple[PodView, bool]]


class PodSource(Protocol):
    """The API requests that a `PodTable` makes."""

    async def list_pods(self, run: str) -> tuple[list[PodView], str]: ...

    def watch_pods(self, run: str, version: str) -> PodChanges: ...


class PodTable:
    """The pods of a run by node, and the last state of those that were removed."""

    def __init__(self, client: PodSource, run: str) -> None:
        self.pods: dict[str, PodView] = {}
        self.removed: dict[str, PodView] = {}
        self._client, self._run = client, run
        self._version = ""
        self._listed_at: float | None = None
        self._changes: PodChanges | None = None
        self._next: asyncio.Future[tuple[PodView, bool]] | None = None  # kept between calls: a watch never ends
        self._alone = asyncio.Lock()

    async def refresh(self, *, anew: bool = False) -> None:
        """Apply the changes that the watch has reported; with `anew`, list all pods. Raise OSError if the API server
        fails."""
        async with self._alone:
            await self._read_changes(_SETTLE_S)
            if anew or self._listed_at is None or time.monotonic() > self._listed_at + _LIST_S:
                await self._list_again()

    def note_created(self, pod: PodView) -> None:
        self.pods[_node_of(pod)] = pod

    async def close(self) -> None:
        """Cancel the watch."""
        task, self._next, self._changes = self._next, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _list_again(self) -> None:
        before = set(self.pods)
        found, version = await self._client.list_pods(self._run)
        now = {_node_of(pod): pod for pod in found}
        # Pods that were created since the request was sent are in the table, but not in its answer.
        missing = {node for node in before if node not in now}
        if missing and self._version:
            await self._read_changes(_CATCH_UP_S, missing)
        await self.close()
        for node in missing & self.pods.keys():
            self.removed[node] = self.pods.pop(node)
        self.pods |= now
        self._version, self._listed_at = version, time.monotonic()
        self._changes = self._client.watch_pods(self._run, version)
        self._next = asyncio.ensure_future(self._changes.__anext__())  # it begins now, not when it is next looked at

    async def _read_changes(self, within_s: float, missing: Collection[str] = ()) -> None:
        """Apply the changes that the watch reports within a time limit. With `missing`, return as soon as the watch has
        reported the removal of all of these nodes' pods."""
        until = time.monotonic() + within_s
        while self._version:
            if missing and all(node in self.removed for node in missing):
                return
            if self._changes is None:  # it broke; the changes since then are told by another, if not too old
                self._changes = self._client.watch_pods(self._run, self._version)
            if self._next is None:
                self._next = asyncio.ensure_future(self._changes.__anext__())
            await asyncio.wait({self._next}, timeout=max(0.0, until - time.monotonic()))
            if not self._next.done():
                return
            task, self._next = self._next, None
            try:
                self._take(*task.result())
            except (OSError, StopAsyncIteration):  # a list follows, which says what is wrong, if anything is
                self._changes, self._listed_at = None, None
                return

    def _take(self, pod: PodView, removed: bool) -> None:
        self._version = pod.metadata.resource_version or self._version
        if removed:
            self.pods.pop(_node_of(pod), None)
            self.removed[_node_of(pod)] = pod
        else:
            self.pods[_node_of(pod)] = pod


def _node_of(pod: PodView) -> str:
    return pod.metadata.labels.get(NODE_LABEL, pod.metadata.name)
