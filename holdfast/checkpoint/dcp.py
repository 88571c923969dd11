"""Checkpoints as torch.distributed.checkpoint knows them: metadata of a layout, and where in files its records lie."""

import io
import math
import mmap
import os
import pickle  # noqa: TID251 what we write torch reads so; we ourselves read it by its own safe reader
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import _weights_only_unpickler
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from holdfast.checkpoint import load
from holdfast.checkpoint.header import PAGE_BYTES
from holdfast.checkpoint.layout import Item, Layout, Path, Ranks, name_of, names
from holdfast.checkpoint.state import StateError, decode

_FILE = re.compile(r"__(\d+)_0\.distcp")
_AT_ONCE_BYTES = 256 << 20

_SAFE: list[Any] = [
    *(Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata, BytesStorageMetadata),
    *(ChunkStorageMetadata, _StorageInfo, _MEM_FORMAT_ENCODING),
]


def file_of(rank: int) -> str:
    """The one file of a rank in a checkpoint: its share of its image."""
    return f"__{rank}_0.distcp"


def metadata(layouts: Sequence[Layout]) -> bytes:
    """The `.metadata` of a checkpoint that consists of every rank's share; the same for every step."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path] = {}
    for name, path, item, place in _entries(layouts):
        paths[name] = path
        index = _enter(tensors, name, item)
        if index in storage:
            raise StateError(f"{storage[index].relative_path} and {place.relative_path} both hold {name}")
        if index:
            storage[index] = place
    return pickle.dumps(Metadata(tensors, paths, storage, StorageMeta()), protocol=2)


def _entries(layouts: Sequence[Layout]) -> Iterator[tuple[str, Path, Item, _StorageInfo]]:
    """Everything under all its names, and where it lies."""
    named = names(layouts)
    for layout in layouts:
        for item, at in layout.owned():
            place = _StorageInfo(file_of(layout.rank), at, item.length)
            yield from ((name, path, item, place) for name, path in _names_of(item, named))


def read(content: bytes) -> Metadata:
    """Metadata that we wrote; of anything else that a pickle may hold nothing is made."""
    with torch.serialization.safe_globals(_SAFE):
        found = _weights_only_unpickler.load(io.BytesIO(content), encoding="utf-8")
    if not isinstance(found, Metadata):
        raise StateError(f"this is no metadata but a {type(found).__name__}")
    return found


def places(found: Metadata, layout: Layout) -> tuple[load.Piece, ...] | None:
    """Where the records of an image lie in the parts of a checkpoint; None if it was cut in another way."""
    pieces: list[load.Piece] = []
    for item in layout.items:
        if _is_nothing(item):
            continue
        place = _place(found, item)
        rank = _FILE.fullmatch(place.relative_path) if place else None
        if place is None or rank is None or place.length != item.length:
            return None
        piece = load.Piece(rank=int(rank[1]), start=place.offset, bytes=place.length, to=item.offset)
        if pieces and _follows(pieces[-1], piece):
            last = pieces.pop()
            piece = msgspec.structs.replace(last, bytes=piece.to + piece.bytes - last.to)
        pieces.append(piece)
    return tuple(map(_in_pages, pieces, [*(piece.to for piece in pieces[1:]), layout.image_bytes]))


def _follows(last: load.Piece, piece: load.Piece) -> bool:
    """Whether what lies between two records in the part is just what lies between them in the image."""
    return last.rank == piece.rank and 0 <= piece.to - last.to == piece.start - last.start


def _in_pages(piece: load.Piece, until: int) -> load.Piece:
    """With the rest of its last page, as shares end with pages: what goes to whole pages is read without a copy."""
    end = -(-(piece.to + piece.bytes) // PAGE_BYTES) * PAGE_BYTES
    aligned = piece.to % PAGE_BYTES == piece.start % PAGE_BYTES == 0
    return msgspec.structs.replace(piece, bytes=end - piece.to) if aligned and end <= until else piece


def _place(found: Metadata, item: Item) -> _StorageInfo | None:
    spec = item.spec
    for key in (name_of(spec.key, spec.group), spec.key):
        whole = found.state_dict_metadata.get(key)
        if whole is None:
            continue
        if not spec.dtype:
            return _found_at(found, MetadataIndex(key)) if isinstance(whole, BytesStorageMetadata) else None
        if not isinstance(whole, TensorStorageMetadata) or str(whole.properties.dtype) != f"torch.{spec.dtype}":
            return None
        same = tuple(whole.size) == spec.whole and any(
            tuple(chunk.offsets) == spec.start and tuple(chunk.sizes) == spec.shape for chunk in whole.chunks
        )
        return _found_at(found, MetadataIndex(key, spec.start)) if same else None
    return None


def _found_at(found: Metadata, index: MetadataIndex) -> _StorageInfo | None:
    info = found.storage_data.get(index)
    return info if isinstance(info, _StorageInfo) else None


def _names_of(item: Item, named: dict[tuple[str, Ranks], str]) -> Iterator[tuple[str, Path]]:
    spec = item.spec
    name = named[spec.key, spec.group]
    for path in (spec.path, *spec.aliases):
        key = ".".join(map(str, path))
        yield (key, path) if name == spec.key else (name_of(key, spec.group), (name_of(key, spec.group),))


def _enter(
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata], name: str, item: Item
) -> MetadataIndex | None:
    """Add a record to what is known of its tensor; None if there is nothing in it."""
    spec = item.spec
    if not spec.dtype:
        tensors[name] = BytesStorageMetadata()
        return MetadataIndex(name)
    properties = TensorProperties(dtype=getattr(torch, spec.dtype))
    whole = tensors.setdefault(name, TensorStorageMetadata(properties, torch.Size(spec.whole), []))
    if not isinstance(whole, TensorStorageMetadata) or tuple(whole.size) != spec.whole:
        raise StateError(f"ranks that hold {name} together differ on what it is")
    if _is_nothing(item):
        return None
    whole.chunks.append(ChunkStorageMetadata(torch.Size(spec.start), torch.Size(spec.shape)))
    return MetadataIndex(name, spec.start, len(whole.chunks) - 1)


def _is_nothing(item: Item) -> bool:
    """Whether this is the empty chunk of a tensor that others hold."""
    return bool(item.spec.dtype) and not item.spec.bytes and math.prod(item.spec.whole) > 0


class Reader(StorageReader):
    """`dcp.load(state, storage_reader=Reader(url))`: like torch's own, but no byte is believed before it is checked."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    @property
    def checkpoint_id(self) -> str:
        return self._url

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        self._url = os.fspath(checkpoint_id) if checkpoint_id is not None else self._url

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read(load.read_metadata(self._url))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted = sorted(plan.items, key=self._where)
        for batch in self._batches(wanted):
            memory = memoryview(mmap.mmap(-1, max(1, sum(self._length(item) for item in batch))))
            pieces, at = [], 0
            for item in batch:
                rank, start = self._where(item)
                pieces.append(load.Piece(rank=rank, start=start, bytes=self._length(item), to=at))
                at += self._length(item)
            load.read_ranges(self._url, pieces, memory)
            for item, piece in zip(batch, pieces, strict=True):
                _hand_over(item, memory[piece.to : piece.to + piece.bytes], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        return True

    def _batches(self, items: list[ReadItem]) -> Iterator[list[ReadItem]]:
        """Neighbours together, as they lie in the same blocks; not too much memory at once."""
        batch: list[ReadItem] = []
        size = 0
        for item in items:
            if batch and size + self._length(item) > _AT_ONCE_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += self._length(item)
        if batch:
            yield batch

    def _where(self, item: ReadItem) -> tuple[int, int]:
        place = self._places[item.storage_index]
        rank = _FILE.fullmatch(place.relative_path)
        if rank is None:
            raise StateError(f"{place.relative_path} is no file of a checkpoint of ours")
        return int(rank[1]), place.offset

    def _length(self, item: ReadItem) -> int:
        return self._places[item.storage_index].length


def _hand_over(item: ReadItem, record: memoryview, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(record))
        return
    whole = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
    part = whole[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


class Planner(DefaultLoadPlanner):
    """Torch's own, but values are kept aside, and nothing but plain ones is made of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, object] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = decode(value.getvalue())
