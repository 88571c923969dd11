"""Restores a state from an image in memory or from a checkpoint, even one that was split among ranks differently."""

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from holdfast.checkpoint import checkpoint_reader, dcp
from holdfast.checkpoint.arena import STORED, Arena, SnapshotName
from holdfast.checkpoint.image_layout import EXTRA, ImageItem, ImageLayout
from holdfast.checkpoint.image_record_locations import locate_pieces
from holdfast.checkpoint.snapshot_metadata_record import unpack_metadata
from holdfast.checkpoint.state_image import StateError, StateImage, bytes_of
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.verified_block_reads import PartPiece
from holdfast.client.checkpointing.extra_state import ExtraState
from holdfast.client.checkpointing.model_state import ModelState
from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.client.checkpointing.replicated_restore import (
    WorldSizes,
    extra_index,
    open_image,
    sign_items,
    spread_image,
)
from holdfast.client.checkpointing.shared_read import read_restored
from holdfast.client.checkpointing.user_built_state_dict import UserState
from holdfast.client.snapshot.cuda_streams import CudaStreams
from holdfast.client.snapshot.gpu_upload import GpuUpload
from holdfast.client.snapshot.rank_snapshots import RankSnapshots
from holdfast.wire.rank_keeper_messages import StateGrant


class RestorePieces(NamedTuple):
    """The byte ranges of a checkpoint that a rank needs: of the state that it alone holds, and of the shared state."""

    own: tuple[PartPiece, ...]
    shared: tuple[PartPiece, ...]


def divide_items(layout: ImageLayout) -> tuple[tuple[ImageItem, ...], tuple[ImageItem, ...]]:
    """Return the items of an image that this rank alone holds, and those that it shares with replicas."""
    own = tuple(item for item in layout.items if len(item.spec.replicas) == 1)
    return own, tuple(item for item in layout.items if len(item.spec.replicas) > 1)


class StateRestore:
    """Restores one rank's state from memory or from a checkpoint."""

    def __init__(self, source: ModelState | UserState, extras: ExtraState, snapshots: RankSnapshots) -> None:
        self._source = source
        self._extras = extras
        self._snapshots = snapshots

    def from_cut(self, state: StateGrant, world: RankWorld) -> tuple[bool, str]:
        """Restore the state that was cut anew for this number of ranks; a collective. Return whether all ranks have
        it, and a sentence for the user. If it could not be cut for some rank, no rank keeps anything of it."""
        told = world.gather_all((state.uncut, self._list_absent(state)), tuple[str, tuple[str, ...]])
        saved_by = f"step {state.step} in memory was saved by {state.cut_from} rank{'s' * (state.cut_from > 1)}"
        if reasons := [why for why, _ in told if why]:
            self.drop_later(-1)
            return False, f"{saved_by} and cannot be cut anew for {world.size}: {reasons[0]}"
        self.from_memory(state.arena, state.slot, state.step, {key for _, absent in told for key in absent})
        return True, f"{saved_by} and cut anew for {world.size}: random numbers will differ, extras are rank 0's"

    def _list_absent(self, state: StateGrant) -> tuple[str, ...]:
        """Return the keys that the granted state lacks; () if nothing was granted."""
        if not state.arena:
            return ()
        image = StateImage(self._snapshots.layout, Arena.open(state.arena).slot_image(state.slot))
        return tuple(unpack_metadata(image.payload_bytes(self._snapshots.extra)).absent)

    def from_memory(self, path: str, slot: int, step: int, absent: Collection[str] = ()) -> None:
        """Restore the snapshot in a slot of the arena at `path`; raises StateError. The arena may be a fetched one. The
        keys in `absent` are left out, though the snapshot may have them."""
        own = path == self._snapshots.path
        arena = self._snapshots.arena if own else Arena.open(path)
        if arena.layout != self._snapshots.layout.digest:
            raise StateError(f"the snapshot of step {step} is laid out for another model or optimizer")
        found = [sealed for sealed in arena.list_sealed() if sealed.slot == slot and sealed.step == step]
        if not found:
            raise StateError(f"there is no whole snapshot of step {step} in slot {slot} of {path}")
        image = self._snapshots.images[slot] if own else StateImage(self._snapshots.layout, arena.slot_image(slot))
        self._upload_image(image, path, arena.image_at(slot), absent)
        if arena.slot_seq(slot) != found[0].seq:
            raise StateError(f"the snapshot of step {step} was overwritten while it was read")

    def from_replicas(self, state: StateGrant, world: RankWorld, generation: int, folder: Path) -> str:
        """Restore the whole state from this node or another rank, as a collective, and keep a snapshot of it. A rank
        that got another rank's state keeps its own random numbers. Return a sentence for the user, or ""."""
        saved_by = self._from_whole(state, folder) if state.source != "replica" else 0
        told = world.gather_all((saved_by, sign_items(self._snapshots.layout)), tuple[int, str])
        source = next((rank for rank, (there, _) in enumerate(told) if there), None)
        if source is None:
            raise StateError(f"no rank has the state of step {state.step}")
        if len({sign for _, sign in told}) > 1:
            raise StateError("ranks have different states, so none can take that of another")
        if not saved_by:
            self._receive_whole(state.step, generation, source)
        else:
            slot = self._find_or_take(state.step, generation)
            if not all(there for there, _ in told):
                spread_image(self._snapshots.images[slot], source=source, lacks=False)
        same = WorldSizes.any or told[source][0] == world.size
        if same:
            return ""
        return f"step {state.step} was saved by {told[source][0]} ranks: random numbers and extras are those of some"

    def _from_whole(self, state: StateGrant, folder: Path) -> int:
        """Restore the whole state from any rank's snapshot on this node, and return how many ranks saved it."""
        arena = Arena.open(state.arena)
        if arena.layout == self._snapshots.layout.digest:
            self.from_memory(state.arena, state.slot, state.step)
            return self._snapshots.layout.world
        image, seq = open_image(arena, state.slot, folder), arena.slot_seq(state.slot)
        told = unpack_metadata(image.payload_bytes(extra_index(image.layout)))
        self._source.restore_image(image, told.absent)
        if arena.slot_seq(state.slot) != seq or told.step != state.step:
            raise StateError(f"the snapshot of step {state.step} was overwritten while it was read")
        self._extras.restore(told, here=True)
        return arena.world

    def _find_or_take(self, step: int, generation: int) -> int:
        """Return the slot of this rank's snapshot of the restored step. If there is no such snapshot, take it now."""
        for sealed in self._snapshots.arena.list_sealed():
            if sealed.step == step:
                return sealed.slot
        things = self._source.read()
        packed = self._extras.pack_extras(step, things.absent, self._extras.made)
        taken = self._snapshots.take_snapshot(SnapshotName(step=step, generation=generation, flags=0), things, packed)
        self._snapshots.close()
        if taken is None:
            raise StateError("there is no free slot for the state that was restored")
        return taken.slot

    def _receive_whole(self, step: int, generation: int, source: int) -> None:
        """Restore the whole state of rank `source`, and keep it as a snapshot of this rank."""
        slot = self._snapshots.arena.begin_slot(step, generation)
        if slot is None:
            raise StateError("there is no free slot for another rank's state")
        image = self._snapshots.images[slot.index]
        image.write_frames()
        extra = spread_image(image, source=source, lacks=True)
        image.put_bytes(self._snapshots.extra, extra)
        slot.seal()
        told = unpack_metadata(image.payload_bytes(self._snapshots.extra))
        self._source.restore_image(image, told.absent)
        self._extras.restore(told, here=False)

    def drop_later(self, step: int) -> None:
        """Drop the snapshots of later steps: they belong to a lineage that the job has left."""
        self._snapshots.arena.drop_after(step)

    def plan_read(self, url: str) -> tuple[Metadata, RestorePieces | None]:
        """Return a checkpoint's metadata and the byte ranges to read, or None for these if it was split otherwise."""
        metadata = dcp.decode_metadata(checkpoint_reader.read_metadata(url))
        layout = self._snapshots.layout
        own, shared = (
            locate_pieces(metadata, msgspec.structs.replace(layout, items=items)) for items in divide_items(layout)
        )
        return metadata, RestorePieces(own, shared) if own is not None and shared is not None else None

    def from_parts(self, world: RankWorld, url: str, made: SnapshotName, pieces: RestorePieces) -> None:
        """Restore a checkpoint that was split among ranks as the state is now; a collective. The rank's part is read
        into a slot, which is sealed as a snapshot. Shared items are read by `read_restored`."""
        slot, why = self._snapshots.arena.begin_slot(made.step, made.generation, STORED), ""
        image = self._snapshots.images[slot.index] if slot else None
        try:
            if image is None:
                raise StorageError("there is no free slot to read into")
            image.forget_contents()
            checkpoint_reader.read_ranges(url, pieces.own, image.memory)
        except StorageError as e:
            why = str(e)
        read_restored(world, url, pieces.shared, image.memory if image else memoryview(b""), why)
        assert slot and image
        slot.seal()
        self._from_image(image)

    def from_other(self, url: str, metadata: Metadata, rank: int) -> str:
        """Restore a checkpoint of another world size or another split; return what could not be restored, or ""."""
        state = {**self._source.loadable_state()}  # of a script's own dict, a copy: it gets no key of ours
        extra = metadata.state_dict_metadata.get(EXTRA)
        rows = torch.zeros(extra.size, dtype=torch.uint8) if isinstance(extra, TensorStorageMetadata) else None
        if rows is not None:
            state[EXTRA] = rows
        planner = dcp.Planner()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            torch_dcp.load(state, storage_reader=dcp.Reader(url), planner=planner, no_dist=True)
        for key, value in planner.values.items():
            self._source.put_value(planner.mappings[key], value)
        if rows is None:
            self._source.finish_load(())
            return "has no extra state of holdfast"
        told = [unpack_metadata(bytes_of(row)) for row in rows]
        self._source.finish_load({key for one in told for key in one.absent})
        here = len(told) == self._snapshots.layout.world
        self._extras.restore(told[rank if here else 0], here=here)
        return "" if here else f"is of {len(told)} ranks: random numbers will differ, extras are rank 0's"

    def _upload_image(self, image: StateImage, path: str, first: int, absent: Collection[str]) -> None:
        """Restore the image at offset `first` of the file `path`. GpuUpload reads it for a state on a GPU."""
        side = self._snapshots.side
        if not side:
            self._from_image(image, absent)
            return
        torch.cuda.synchronize(side.device)  # whatever is still to be done to these tensors
        fetching = self._snapshots.fetching or GpuUpload(lambda: CudaStreams(side.device))
        self._snapshots.fetching = None
        # All is there before anybody is told so.
        with fetching.from_file(path, first) as fetch, image.fetched_by(fetch, fetching.finish):
            self._from_image(image, absent)

    def _from_image(self, image: StateImage, absent: Collection[str] = ()) -> None:
        told = unpack_metadata(image.payload_bytes(self._snapshots.extra))
        self._source.restore_image(image, {*told.absent, *absent})
        self._extras.restore(told, here=True)
