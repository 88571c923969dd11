"""Without an agent, the rank itself makes checkpoints of its snapshots: in a thread, from the memory they lie in."""

import threading
import time
from collections.abc import Callable

import torch
from torch.distributed.distributed_c10d import _get_default_store

from holdfast.checkpoint.arena import Sealed
from holdfast.checkpoint.lane import Lane, Pulse
from holdfast.checkpoint.manifest import Author, Part, StorageError
from holdfast.checkpoint.owner import take
from holdfast.checkpoint.persist import begun, collect, publish, staging, write_part
from holdfast.checkpoint.retention import clean, retain
from holdfast.client.snapshots import Snapshots
from holdfast.client.world import World
from holdfast.core.cadence import interval
from holdfast.wire.keeping import Storage

_ASK_EVERY = 16  # saves; a rank that must ask rank 0 whether it is time does so no more often
_PARTS_S = 600.0  # other ranks have as long to write theirs
_SEALED_S, _LOOK_S = 600.0, 0.01
_FAILURES_PER_DAY = 1.0


class Due:
    """When a snapshot is to become a checkpoint; every rank comes to the same answer."""

    def __init__(self, storage: Storage, world: World) -> None:
        self._storage = storage
        self._world = world
        self._saves = 0
        self._last_at = time.monotonic()

    def now(self, step: int, stall_s: float) -> bool:
        self._saves += 1
        if self._storage.every_steps:
            return step % self._storage.every_steps == 0
        if self._world.size == 1:
            return self._timely(stall_s)
        if self._saves % _ASK_EVERY:
            return False
        store, key = _get_default_store(), f"holdfast/due/{self._saves}"
        if self._world.rank == 0:
            store.set(key, "1" if self._timely(stall_s) else "0")
        return bool(store.get(key) == b"1")

    def _timely(self, stall_s: float) -> bool:
        every_s = self._storage.every_s or interval(stall_s, _FAILURES_PER_DAY).every_s
        timely = time.monotonic() - self._last_at >= every_s
        if timely:
            self._last_at = time.monotonic()
        return timely


class Storing:
    """At most one write at a time; what comes meanwhile is left out."""

    def __init__(self, storage: Storage, world: World, author: Author, say: Callable[[str], None]) -> None:
        self._storage = storage
        self._world = world
        self._author = author
        self._say = say
        self._lane = Lane(storage.url, say)
        self._thread: threading.Thread | None = None
        self._taken = False
        self.offered = -1  # newest step that was taken on

    def offer(self, snapshots: Snapshots, metadata: bytes, sealed: Sealed) -> bool:
        """Write this snapshot, unless another one is still being written."""
        if self._thread and self._thread.is_alive():
            return False
        snapshots.arena.hold(sealed.slot)
        self.offered = sealed.step
        name = f"holdfast-store-{sealed.step}"
        self._thread = threading.Thread(target=self._carry, args=(snapshots, metadata, sealed), name=name, daemon=True)
        self._thread.start()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the write that is under way has ended; False if it has not."""
        if self._thread:
            self._thread.join(timeout_s)
        return not (self._thread and self._thread.is_alive())

    def _carry(self, snapshots: Snapshots, metadata: bytes, sealed: Sealed) -> None:
        try:
            outcome = self._lane.run(sealed.step, lambda pulse: self._write(snapshots, metadata, sealed, pulse))
        finally:
            snapshots.arena.unpin(sealed.slot)
        if not outcome.ok:
            self._say(outcome.detail)

    def _write(self, snapshots: Snapshots, metadata: bytes, sealed: Sealed, pulse: Pulse) -> str:
        base, step, world = self._storage.url, sealed.step, self._world
        if world.rank == 0 and not self._taken:
            take(base, self._author)
            self._taken = True
        folder = staging(base, step, self._author)
        if world.rank and not begun(folder, pulse):
            return ""
        until = time.monotonic() + _SEALED_S
        while snapshots.arena.seq(sealed.slot) != sealed.seq:  # a GPU is still copying
            if time.monotonic() > until:
                raise StorageError(f"the snapshot was not whole after {_SEALED_S:g} s")
            time.sleep(_LOOK_S)
            pulse.beat()
        image = snapshots.arena.image(sealed.slot)
        share = [image[part.start : part.end] for part in snapshots.layout.share()]
        parts: tuple[Part, ...] = (write_part(folder, world.rank, share, pulse=pulse),)
        if world.rank:
            return ""
        if world.size > 1:
            parts = collect(folder, world.size, _PARTS_S, pulse)
        layout, version = snapshots.layout.digest.hex(), str(torch.__version__)
        url = publish(base, step, parts, metadata, author=self._author, layout=layout, torch=version, pulse=pulse)
        try:
            retain(base, self._storage.keep, self._storage.keep_every, newest=step)
            clean(base, self._author)
        except StorageError as e:
            self._say(f"step {step} was written, but older ones could not be removed: {e}")
        return url
