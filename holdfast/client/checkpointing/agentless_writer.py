"""Without an agent, writes a rank's snapshots as checkpoints from a thread of the rank itself."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.distributed.distributed_c10d import _get_default_store

from holdfast.checkpoint.arena import SealedSnapshot
from holdfast.checkpoint.checkpoint_publication import (
    collect_parts,
    publish_checkpoint,
    staging_folder,
    wait_until_begun,
    withdraw_write,
    write_part,
)
from holdfast.checkpoint.manifest import Author, CheckpointPart
from holdfast.checkpoint.retention import clean_unpublished, retain_checkpoints
from holdfast.checkpoint.storage_errors import PartFailedError, StorageError
from holdfast.checkpoint.storage_owner import OwnedStorages, release_ownership
from holdfast.checkpoint.write_lane import WriteLane, WritePulse
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.snapshot.rank_snapshots import RankSnapshots
from holdfast.core.snapshots.checkpoint_interval import best_interval
from holdfast.wire.rank_keeper_messages import CheckpointPolicy

_ASK_EVERY = 16  # saves; a rank that must ask rank 0 whether it is time does so no more often
_PARTS_S = 600.0  # other ranks have as long to write theirs
_SEALED_S, _LOOK_S = 600.0, 0.01
_FAILURES_PER_DAY = 1.0


class CheckpointTimer:
    """Decides when a snapshot becomes a checkpoint; every rank gets the same answer."""

    def __init__(self, storage: CheckpointPolicy, world: RankWorld) -> None:
        self._storage = storage
        self._world = world
        self._saves = 0
        self._last_at = time.monotonic()

    def is_due(self, step: int, stall_s: float) -> bool:
        self._saves += 1
        if self._storage.every_steps:
            return step % self._storage.every_steps == 0
        if self._world.size == 1:
            return self._is_timely(stall_s)
        if self._saves % _ASK_EVERY:
            return False
        store, key = _get_default_store(), f"holdfast/due/{self._saves}"
        if self._world.rank == 0:
            store.set(key, "1" if self._is_timely(stall_s) else "0")
        return bool(store.get(key) == b"1")

    def _is_timely(self, stall_s: float) -> bool:
        every_s = self._storage.every_s or best_interval(stall_s, _FAILURES_PER_DAY).every_s
        timely = time.monotonic() - self._last_at >= every_s
        if timely:
            self._last_at = time.monotonic()
        return timely


class LocalWriter:
    """Writes at most one checkpoint at a time; snapshots offered meanwhile are left out."""

    def __init__(self, storage: CheckpointPolicy, world: RankWorld, author: Author, say: Callable[[str], None]) -> None:
        self._storage = storage
        self._world = world
        self._author = author
        self._say = say
        self._lane = WriteLane(storage.url, say)
        self._thread: threading.Thread | None = None
        self._taken = False
        self._owned = OwnedStorages()
        self.offered = -1  # newest step that was taken on

    def offer_snapshot(self, snapshots: RankSnapshots, metadata: bytes, sealed: SealedSnapshot) -> bool:
        """Start writing this snapshot; False if another one is still being written."""
        if self._thread and self._thread.is_alive():
            return False
        snapshots.arena.pin_own(sealed.slot)
        self.offered = sealed.step
        name = f"holdfast-store-{sealed.step}"
        self._thread = threading.Thread(
            target=self._run_write, args=(snapshots, metadata, sealed), name=name, daemon=True
        )
        self._thread.start()
        return True

    def release_path(self) -> None:
        """Let another run write to the path, unless a write of ours is under way."""
        if self._taken and self.wait(0.0):
            self._taken = False
            self._owned.forget(self._storage.url)
            with suppress(StorageError):  # then it waits for the end of this process
                release_ownership(self._storage.url, self._author)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the current write to end; False if it has not ended in time."""
        if self._thread:
            self._thread.join(timeout_s)
        return not (self._thread and self._thread.is_alive())

    def _run_write(self, snapshots: RankSnapshots, metadata: bytes, sealed: SealedSnapshot) -> None:
        try:
            outcome = self._lane.run(
                sealed.step, lambda pulse: self._write_checkpoint(snapshots, metadata, sealed, pulse)
            )
        finally:
            snapshots.arena.unpin(sealed.slot)
        if not outcome.ok:
            self._say(outcome.detail)

    def _write_checkpoint(
        self, snapshots: RankSnapshots, metadata: bytes, sealed: SealedSnapshot, pulse: WritePulse
    ) -> str:
        base, step, world = self._storage.url, sealed.step, self._world
        if world.rank == 0:
            self._owned.take(base, self._author, step, pulse.notes)
            self._taken = True
        folder = staging_folder(base, step, self._author)
        if world.rank and not wait_until_begun(folder, pulse):
            return ""
        until = time.monotonic() + _SEALED_S
        while (seq := snapshots.arena.slot_seq(sealed.slot)) != sealed.seq:  # a GPU is still copying
            if seq > sealed.seq:
                raise StorageError("the snapshot was dropped, because its state changed while it was copied")
            if time.monotonic() > until:
                raise StorageError(f"the snapshot was not whole after {_SEALED_S:g} s")
            time.sleep(_LOOK_S)
            pulse.add_bytes()
        image = snapshots.arena.slot_image(sealed.slot)
        share = [image[part.start : part.end] for part in snapshots.layout.owned_ranges()]
        parts: tuple[CheckpointPart, ...] = (write_part(folder, world.rank, share, pulse=pulse),)
        if world.rank:
            return ""
        if world.size > 1:
            try:
                parts = collect_parts(folder, world.size, _PARTS_S, pulse)
            except PartFailedError as e:
                withdraw_write(folder, world.size, str(e))
                raise
        layout, version = snapshots.layout.digest.hex(), str(torch.__version__)
        url = publish_checkpoint(
            base, step, parts, metadata, author=self._author, layout=layout, torch=version, pulse=pulse
        )
        try:
            retain_checkpoints(base, self._storage.keep, self._storage.keep_every, newest=step)
            clean_unpublished(base, self._author)
        except StorageError as e:
            self._say(f"step {step} was written, but older ones could not be removed: {e}")
        return url
