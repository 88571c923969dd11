"""A storage reader for `dcp.load`: reads from the node's memory, from our checkpoints, or from torch's own."""

import io
import mmap
import os
from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, StorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from holdfast.checkpoint import checkpoint_reader, snapshot_metadata_record, storage_opener
from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.dcp.checkpoint_ids import locate_checkpoint, same_place, step_under
from holdfast.checkpoint.dcp.plan_layout import rank_and_world, unpad_value
from holdfast.checkpoint.dcp.torch_metadata import decode_metadata, single_image_metadata
from holdfast.checkpoint.image_layout import ALIGN_BYTES, ImageLayout
from holdfast.checkpoint.image_record_locations import rank_of
from holdfast.checkpoint.keeper_client import KeeperClient, current_generation
from holdfast.checkpoint.manifest import MANIFEST, METADATA
from holdfast.checkpoint.state_image import KNOWN_RECORDS, StateError, StateImage, decode_value, record_frame
from holdfast.checkpoint.verified_block_reads import PartPiece
from holdfast.decoding import from_msgpack
from holdfast.wire.rank_keeper_messages import StateGrant, StateRequest

T = TypeVar("T")
_AT_ONCE_BYTES = 256 << 20


class Reader(StorageReader):
    """Reads for `dcp.load(state, storage_reader=Reader(url))`: from memory if the agent has it, else from storage.

    `url` is a checkpoint or a folder of checkpoints. In a folder, the checkpoint id names the step to read; without an
    id, the newest checkpoint is read. Every byte of holdfast's checkpoints is verified. Torch's own checkpoints have no
    checksums, so they are read unverified.

    >>> import torch.distributed.checkpoint as dcp
    >>> from holdfast.checkpoint.dcp import Reader, Writer
    >>> state = {"weight": torch.ones(2)}
    >>> saved = dcp.save(state, checkpoint_id="step-1", storage_writer=Writer("read"), no_dist=True)
    >>> dcp.load(state, storage_reader=Reader("read"), no_dist=True)
    """

    def __init__(self, url: "str | os.PathLike[str]") -> None:
        self._url = os.fspath(url)
        self._id = ""
        self._place = self._url  # what is read
        self._image: StateImage | None = None
        self._theirs: StorageReader | None = None
        self._contents = Metadata({})

    @property
    def checkpoint_id(self) -> str:
        return self._id or self._url

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        self._id = os.fspath(checkpoint_id) if checkpoint_id is not None else self._id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._image = self._theirs = None
        link = KeeperClient.for_this_rank()
        state = (
            link.request_state(StateRequest(rank=rank_and_world()[0], generation=current_generation()))
            if link
            else StateGrant(source="none")
        )
        named = self._id and not same_place(self._id, self._url)
        if state.arena and (not named or step_under(self._id, self._url) == state.step):
            image = Arena.open(state.arena).slot_image(state.slot)
            self._image = StateImage(
                layout := from_msgpack(snapshot_metadata_record.find_metadata(image).layout, ImageLayout), image
            )
            return single_image_metadata(layout)
        self._place = locate_checkpoint(self._url, self._id) if named or not state.url else state.url
        return self._read_torch(kwargs.get("rank")) or decode_metadata(checkpoint_reader.read_metadata(self._place))

    def _read_torch(self, rank: int | None) -> Metadata | None:
        """Return the metadata if torch wrote this checkpoint, else None. With `rank`, read the rank's own file."""
        here = storage_opener.open_storage(self._place)
        if here.file_size(MANIFEST) is not None:
            return None
        content = here.read(METADATA if rank is None else f"__{rank}{METADATA}")
        if content is None:
            return None
        if "://" in here.url():
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            self._theirs = FsspecReader(here.url())
        else:
            self._theirs = FileSystemReader(here.url())
        return decode_metadata(content)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._contents = metadata
        if self._theirs:
            self._theirs.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._theirs:
            return self._theirs.read_data(plan, planner)
        if self._image:
            for item in plan.items:
                index = self._places[item.storage_index]
                _hand_over(item, self._image.payload_bytes(index), self._image.payloads[index], planner)
            return completed_future(None)
        records = _RecordTensors(self._contents)
        for batch in self._batches(sorted(plan.items, key=self._where)):
            memory = memoryview(mmap.mmap(-1, max(1, sum(self._room(item) for item in batch))))
            pieces, at = [], 0
            for item in batch:
                rank, start = self._where(item)
                pieces.append(PartPiece(rank=rank, start=start, bytes=self._length(item), to=at))
                at += self._room(item)
            checkpoint_reader.read_ranges(self._place, pieces, memory)
            for item, piece in zip(batch, pieces, strict=True):
                record = memory[piece.to : piece.to + piece.bytes]
                tensor = None if item.type == LoadItemType.BYTE_IO else records.read_tensor(item.storage_index, record)
                _hand_over(item, record, tensor, planner)
        return completed_future(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        return True

    @property
    def _places(self) -> Any:
        return self._contents.storage_data

    def _batches(self, items: list[ReadItem]) -> Iterator[list[ReadItem]]:
        """Yield items in batches of neighbours, which share blocks; each batch takes limited memory."""
        ends = accumulate(self._length(item) for item in items)
        for _, batch in groupby(zip(items, ends, strict=True), key=lambda pair: pair[1] // _AT_ONCE_BYTES):
            yield [item for item, _ in batch]

    def _where(self, item: ReadItem) -> tuple[int, int]:
        place = self._places[item.storage_index]
        rank = rank_of(place.relative_path)
        if rank is None:
            raise StateError(f"{place.relative_path} is not a file of a holdfast checkpoint")
        return rank, place.offset

    def _length(self, item: ReadItem) -> int:
        return int(self._places[item.storage_index].length)

    def _room(self, item: ReadItem) -> int:
        """Return a record's length, rounded up so that the next one is aligned, which torch's complex numbers need."""
        return -(-self._length(item) // ALIGN_BYTES) * ALIGN_BYTES


class Planner(DefaultLoadPlanner):
    """Torch's load planner, except that non-tensor values go to `values` and are decoded only if they are plain."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, object] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = decode_value(value.getvalue())


class _RecordTensors:
    """Makes tensors from records. A record in our own form is read without unpickling, which would be slow."""

    def __init__(self, contents: Metadata) -> None:
        self._known = contents.state_dict_metadata
        self._shapes: set[tuple[str, tuple[int, ...]]] = set()

    def read_tensor(self, index: MetadataIndex, record: memoryview) -> torch.Tensor:
        dtype, shape = self._dtype_and_shape(index)
        self._shapes.add((dtype, shape))
        if len(self._shapes) <= KNOWN_RECORDS:  # beyond, to make the beginning would cost as much
            frame, kind = record_frame(dtype, shape), getattr(torch, dtype)
            start, size = len(frame.head), len(record) - len(frame.head) - len(frame.tail)
            if size == kind.itemsize * torch.Size(shape).numel() > 0 and record[:start] == frame.head:
                return torch.frombuffer(record[start : start + size], dtype=kind).view(shape)
        found: torch.Tensor = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
        return found

    def _dtype_and_shape(self, index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
        known = self._known[index.fqn]
        assert isinstance(known, TensorStorageMetadata)
        hint = index.index if index.index is not None and index.index < len(known.chunks) else 0
        chunk = known.chunks[hint]
        if chunk.offsets != index.offset:
            chunk = next(one for one in known.chunks if one.offsets == index.offset)
        return str(known.properties.dtype).removeprefix("torch."), tuple(chunk.sizes)


def _hand_over(item: ReadItem, record: memoryview, whole: torch.Tensor | None, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(unpad_value(record)))
        return
    assert whole is not None
    if tuple(item.lengths) != whole.shape:
        whole = whole[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
    target = planner.resolve_tensor(item).detach()
    target.copy_(whole)
    planner.commit_tensor(item, target)


def completed_future(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future
