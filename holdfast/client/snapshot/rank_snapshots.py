"""The snapshots of one rank: its arena, the images in the slots, and the copies by CPU or GPU."""

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch

from holdfast.checkpoint.arena import Arena, SealedSnapshot, SnapshotName
from holdfast.checkpoint.image_layout import EXTRA, ImageLayout
from holdfast.checkpoint.memory_copy import MemoryCopier
from holdfast.checkpoint.state_image import StateError, StateImage
from holdfast.client.snapshot.cuda_graph_replays import GRAPH_WATCH
from holdfast.client.snapshot.cuda_streams import CudaStreams
from holdfast.client.snapshot.gpu_upload import GpuUpload
from holdfast.client.snapshot.registered_arena import RegisteredArena
from holdfast.client.snapshot.seal_fence import SEAL_FENCE
from holdfast.client.snapshot.side_stream import SideStream
from holdfast.client.snapshot.state_item_locations import ABSENT, CurrentItems


def make_own_arena(layout: ImageLayout, slots: int) -> tuple[Arena, str]:
    """Make an arena in memory of this process, where there is no agent. Return it and a name for it."""
    fd = os.memfd_create("holdfast")
    try:
        return Arena.make(fd, layout=layout.digest, image_bytes=layout.image_bytes, slots=slots), f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


class RankSnapshots:
    """Takes the snapshots of one rank. Their memory, and the bytes that all of them share, are prepared beforehand."""

    def __init__(self, layout: ImageLayout, arena: Arena, path: str) -> None:
        self.layout = layout
        self.arena = arena
        self.path = path
        self.extra = next(index for index, item in enumerate(layout.items) if item.spec.key == EXTRA)
        self.side: SideStream | None = None
        self._copier = MemoryCopier()
        self._seals = SEAL_FENCE.make_pass()
        self._registered: RegisteredArena | None = None
        self.fetching: GpuUpload | None = None
        self.images = [StateImage(layout, arena.slot_image(slot)) for slot in range(arena.slots)]
        # In a whole slot it is written already, and what lies there may have to be restored yet.
        for slot in set(range(arena.slots)) - {sealed.slot for sealed in arena.list_sealed()}:
            self.images[slot].write_frames()

    def populate_memory(self) -> None:
        """Fault in every page of the arena now, so that copies by the CPU do not wait for the kernel."""
        self.arena.populate_pages()

    def use_gpu(
        self, device: torch.device, guarded: Sequence[bool], say: Callable[[str], None], *, followed: bool
    ) -> None:
        """Let the GPU make all copies from now on. `guarded` says for each item whether only announced steps change it.
        Without `followed`, the script itself must announce its steps, and its announcements are checked."""
        GRAPH_WATCH.start()
        self._registered = registered = RegisteredArena(self.arena, self.layout, device, say)
        for slot, image in enumerate(self.images):
            image.use_reach(partial(registered.wait_reachable, slot))
        if self.arena.list_sealed():  # it will most likely be restored
            self.fetching = GpuUpload(lambda: CudaStreams(device))
        else:
            registered.start_registering()
        self.side = SideStream(
            self.layout, self.arena, guarded, CudaStreams(device), registered.wait_reachable, say=say, followed=followed
        )  # fmt: skip

    def check_capture(self) -> None:
        """Raise StateError while the script captures a CUDA graph: a copy queued now would only run at replays."""
        if self.side and self.side.is_capturing():
            raise StateError("a CUDA graph is being captured: call save() between its replays, not inside of it")

    def on_restored(self) -> None:
        """Free what only a restore needs. Register the arena with the GPU once the first step has been launched."""
        if self.fetching:
            self.fetching.finish()
            self.fetching = None
        if self._registered:
            self._registered.register_later()

    def before_step(self, *_: object) -> None:
        """Make the GPU wait before it changes the state, until the queued copies of a snapshot have read it."""
        if self._registered:
            self._registered.start_registering()
        if self.side:
            self.side.before_step()

    def take_snapshot(self, name: SnapshotName, things: CurrentItems, packed: bytes) -> SealedSnapshot | None:
        """Copy the state into a slot; None if no slot was free. A copy by the GPU is sealed a little later."""
        if len(packed) > (most := self.layout.items[self.extra].spec.bytes):
            raise StateError(f"the extras have outgrown their room of {most} bytes, twice what they were at the start")
        if self.side and self.side.can_copy(things):
            claim = self.side.queue_snapshot(name, things, packed)
            named = {"step": name.step, "generation": name.generation, "flags": name.flags}
            return SealedSnapshot(slot=claim.slot, seq=claim.seq + 1, at=claim.at, **named) if claim else None
        if self.side:
            self.side.drain()
        return self._copy_on_cpu(name, things, packed)

    def close(self) -> None:
        """Wait until all queued snapshots are sealed."""
        if self.side:
            self.side.drain()

    def free_memory(self) -> None:
        """Free the memory; no snapshots can be taken after this."""
        self.close()
        if self._registered:
            self._registered.close()

    def _copy_on_cpu(self, name: SnapshotName, things: CurrentItems, packed: bytes) -> SealedSnapshot | None:
        slot = self.arena.begin_slot(name.step, name.generation, name.flags)
        if slot is None:
            return None
        image = self.images[slot.index]
        moves = []
        with torch.no_grad():
            for index, thing in enumerate(things.all):
                if isinstance(thing, torch.Tensor):
                    moves.append(image.put_tensor(index, thing))
                elif thing is not ABSENT:
                    image.put_value(index, thing)
        self._copier.copy_moves(filter(None, moves))
        image.put_bytes(self.extra, packed)
        with self._seals.lock:
            if not self._seals.is_valid:
                return None
            slot.seal()
        return self.arena.list_sealed()[0]
