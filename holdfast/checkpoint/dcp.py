"""Checkpoints as torch.distributed.checkpoint knows them: their metadata, and storage for its `save` and `load`."""

import dataclasses
import io
import mmap
import os
import pickle  # noqa: TID251 what we write torch reads so; we ourselves read it by its own safe reader
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import _weights_only_unpickler
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader, StorageWriter
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
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.checkpoint import load, persist, storage, told
from holdfast.checkpoint.arena import DUE, Arena, Slot
from holdfast.checkpoint.copying import Copier
from holdfast.checkpoint.layout import EXTRA, Item, Layout, Path, Ranks, Spec, arrange, is_nothing, name_of, names
from holdfast.checkpoint.link import Link, generation, want_of
from holdfast.checkpoint.manifest import MANIFEST, Author
from holdfast.checkpoint.owner import take
from holdfast.checkpoint.places import file_of, rank_of
from holdfast.checkpoint.retention import find, retain
from holdfast.checkpoint.state import Image, StateError, decode, extra_spec, local, sizes
from holdfast.core.decoding import from_msgpack
from holdfast.wire.keeping import Resume, State, Storage
from holdfast.wire.replaying import redirected

T = TypeVar("T")
_AT_ONCE_BYTES = 256 << 20
_SPARE_BYTES = 32 << 10
_PARTS_S = 600.0  # other ranks have as long to write theirs

_SAFE: list[Any] = [
    *(Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata, BytesStorageMetadata),
    *(ChunkStorageMetadata, _StorageInfo, _MEM_FORMAT_ENCODING),
]


def metadata(layouts: Sequence[Layout]) -> bytes:
    """The `.metadata` of a checkpoint that consists of every rank's share; the same for every step."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    held: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path] = {}
    for name, path, item, place in _entries(layouts):
        paths[name] = path
        index = _enter(tensors, name, item)
        if index in held:
            raise StateError(f"{held[index].relative_path} and {place.relative_path} both hold {name}")
        if index:
            held[index] = place
    return pickle.dumps(Metadata(tensors, paths, held, StorageMeta()), protocol=2)


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
    if is_nothing(spec):
        return None
    whole.chunks.append(ChunkStorageMetadata(torch.Size(spec.start), torch.Size(spec.shape)))
    return MetadataIndex(name, spec.start, len(whole.chunks) - 1)


def _of_one(layout: Layout) -> Metadata:
    """The metadata of a single image, by which the number of each record is found."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {_enter(tensors, item.spec.key, item): number for number, item in enumerate(layout.items)}
    return Metadata(tensors, {item.spec.key: item.spec.path for item in layout.items}, places)


def _index(spec: Spec) -> MetadataIndex:
    return MetadataIndex(spec.key, spec.start) if spec.dtype else MetadataIndex(spec.key)


class Reader(StorageReader):
    """`dcp.load(state, storage_reader=Reader(url))`: from memory if an agent has the state there, else from storage.

    `url` is a checkpoint, or where they lie: then the newest is meant. No byte is believed before it is checked.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._image: Image | None = None
        self._places: dict[MetadataIndex, Any] = {}

    @property
    def checkpoint_id(self) -> str:
        return self._url

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        self._url = os.fspath(checkpoint_id) if checkpoint_id is not None else self._url

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._image = None
        link = Link.here()
        state = link.resume(Resume(rank=_seat()[0], generation=generation())) if link else State(source="none")
        if state.arena:
            image = Arena.open(state.arena).image(state.slot)
            self._image = Image(layout := from_msgpack(told.found(image).layout, Layout), image)
            return _of_one(layout)
        self._url = state.url or self._url
        if not storage.at(self._url).read(MANIFEST):
            self._url = next((one.url for one in find(self._url) if one.ok), self._url)
        return read(load.read_metadata(self._url))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._image:
            for item in plan.items:
                index = self._places[item.storage_index]
                _hand_over(item, self._image.payload_bytes(index), self._image.payloads[index], planner)
            return _done(None)
        for batch in self._batches(sorted(plan.items, key=self._where)):
            memory = memoryview(mmap.mmap(-1, max(1, sum(self._length(item) for item in batch))))
            pieces, at = [], 0
            for item in batch:
                rank, start = self._where(item)
                pieces.append(load.Piece(rank=rank, start=start, bytes=self._length(item), to=at))
                at += self._length(item)
            load.read_ranges(self._url, pieces, memory)
            for item, piece in zip(batch, pieces, strict=True):
                record = memory[piece.to : piece.to + piece.bytes]
                tensor = None if item.type == LoadItemType.BYTE_IO else _loaded(record)
                _hand_over(item, record, tensor, planner)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        return True

    def _batches(self, items: list[ReadItem]) -> Iterator[list[ReadItem]]:
        """Neighbours together, as they lie in the same blocks; not too much memory at once."""
        ends = accumulate(self._length(item) for item in items)
        for _, batch in groupby(zip(items, ends, strict=True), key=lambda pair: pair[1] // _AT_ONCE_BYTES):
            yield [item for item, _ in batch]

    def _where(self, item: ReadItem) -> tuple[int, int]:
        place = self._places[item.storage_index]
        rank = rank_of(place.relative_path)
        if rank is None:
            raise StateError(f"{place.relative_path} is no file of a checkpoint of ours")
        return rank, place.offset

    def _length(self, item: ReadItem) -> int:
        return int(self._places[item.storage_index].length)


class Planner(DefaultLoadPlanner):
    """Torch's own, but values are kept aside, and nothing but plain ones is made of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, object] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = decode(value.getvalue())


class Writer(StorageWriter):
    """`dcp.save(state, checkpoint_id="step-10", storage_writer=writer)`; one writer for all saves of a rank.

    The step is the number in the id, or one more than before. With an agent the state is copied into the node's memory,
    whole, and the keeper does the rest; without, this rank's part is written to `url` before save returns.
    """

    def __init__(self, url: str, *, keep: int = 3, slots: int = 3) -> None:
        self._storage = Storage(url=redirected(url), keep=keep)  # a replay never publishes
        self._slots = slots
        self._step, self._next = -1, 0
        self._run = secrets.token_hex(8)
        self._layout: Layout | None = None
        self._image: Image | None = None  # without an agent
        self._arena: Arena | None = None
        self._slot: Slot | None = None  # that the coordinator seals when the metadata is there

    @property
    def checkpoint_id(self) -> str:
        return self._storage.url

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        if found := re.search(r"(\d+)\D*$", os.fspath(checkpoint_id or "")):
            self._next = int(found[1])

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        self._step, self._next = self._next, self._next + 1

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._local = plan.items  # before those that other ranks write are taken out: a snapshot is whole
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=self._run) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._author = Author(generation(), plan.storage_data)
        things = {item.index: planner.resolve_data(item) for item in self._local}
        layout = self._layout = _laid_out(self._local, things, {item.index for item in plan.items}, self._layout)
        image = self._begun(layout)
        moves = []
        for number, item in enumerate(layout.items):
            thing = things.get(_index(item.spec))
            if isinstance(thing, torch.Tensor):
                moves.append(image.put(number, local(thing)))
            elif thing is not None:
                image.put_bytes(number, thing.getvalue().ljust(item.spec.bytes, b"\0"))  # no end of a longer one
            else:
                image.put_bytes(number, _said(layout, self._step))
        Copier().run(filter(None, moves))
        if self._slot and not self._is_coordinator:
            self._slot.seal()
        if not self._arena:
            share = [image.memory[part.start : part.end] for part in layout.share()]
            persist.write_part(persist.staging(self._storage.url, self._step, self._author), layout.rank, share)
        where = [(item, _StorageInfo(file_of(layout.rank), at, item.length)) for item, at in layout.owned()]
        return _done([WriteResult(_index(i.spec), i.length, place) for i, place in where if i.spec.key != EXTRA])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {one.index: one.storage_data for some in results for one in some}
        content = pickle.dumps(metadata, protocol=2)
        if self._slot and (link := Link.here()):
            link.put(self._metadata_name, content)
            self._slot.seal()
            return
        url, step = self._storage.url, self._step
        take(url, self._author)
        parts = persist.collect(persist.staging(url, step, self._author), len(results), _PARTS_S)
        persist.publish(url, step, parts, content, author=self._author, torch=str(torch.__version__))
        retain(url, self._storage.keep, newest=step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        return True

    def _begun(self, layout: Layout) -> Image:
        """Memory to copy into; the same as before if the layout is."""
        link = Link.here()
        if not link:
            if not self._image or self._image.layout.digest != layout.digest:
                self._image = Image(layout, memoryview(mmap.mmap(-1, layout.image_bytes)))
                self._image.stamp()
            return self._image
        if not self._arena or self._arena.layout != layout.digest:
            self._metadata_name = f"metadata-{layout.digest.hex()[:32]}"
            path = str(link.path.parent / self._metadata_name) if self._is_coordinator else ""
            want = want_of(layout, self._slots, path, self._storage)
            self._arena = Arena.open(link.want(want, layout))
            self._arena.touch()
        self._slot = self._arena.begin(self._step, generation(), DUE)
        if self._slot is None:
            raise StateError("no slot is free: the snapshots before are still being written")
        image = Image(layout, self._slot.image)
        image.stamp()
        return image


def _laid_out(
    items: Sequence[WriteItem], things: dict[MetadataIndex, Any], owned: Collection[MetadataIndex], last: Layout | None
) -> Layout:
    """An image of everything that this rank has; what other ranks write is there too, but not its own to write.

    The last layout again, if all still fits into it: with another, memory would be another too.
    """
    rank, world = _seat()
    specs = [_spec(item, things[item.index], (rank,) if item.index in owned else (-1, rank)) for item in items]
    rooms = {_index(item.spec): item.spec for item in last.items if item.spec.key != EXTRA} if last else {}
    if last and len(rooms) == len(specs) and all(_fits(spec, rooms.get(_index(spec)), things) for spec in specs):
        return last
    said = len(_said(arrange(specs, sizes, rank=rank, world=world)))
    extra = extra_spec(-(-2 * said // _SPARE_BYTES) * _SPARE_BYTES, 0, 1)
    return arrange([extra, *specs], sizes, rank=rank, world=world, form=f"torch {torch.__version__}")


def _fits(spec: Spec, room: Spec | None, things: dict[MetadataIndex, Any]) -> bool:
    if room is None or spec.dtype:
        return spec == room
    same = msgspec.structs.replace(spec, bytes=room.bytes) == room
    return same and len(things[_index(spec)].getbuffer()) <= room.bytes


def _spec(item: WriteItem, thing: Any, replicas: Ranks) -> Spec:
    key, chunk = item.index.fqn, item.tensor_data
    if chunk is None:
        size = len(thing.getbuffer())
        room = -(-min(2 * size, size + _SPARE_BYTES) // 64) * 64  # torch finds a value before as many zeros
        return Spec(key=key, path=(key,), bytes=room, group=replicas[-1:], replicas=replicas, alike=False)
    return Spec(
        key=key,
        path=(key,),
        bytes=local(thing).nbytes,
        dtype=str(thing.dtype).removeprefix("torch."),
        shape=tuple(chunk.chunk.sizes),
        whole=tuple(chunk.size),
        start=tuple(chunk.chunk.offsets),
        group=replicas[-1:],
        replicas=replicas,
        alike=False,
    )


def _said(layout: Layout, step: int = 0) -> bytes:
    return told.packed(told.Told(step=step, layout=msgspec.msgpack.encode(layout)))


def _hand_over(item: ReadItem, record: memoryview, whole: torch.Tensor | None, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(record))
        return
    assert whole is not None
    part = whole[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def _loaded(record: memoryview) -> torch.Tensor:
    found: torch.Tensor = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
    return found


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _seat() -> tuple[int, int]:
    """This rank, of how many."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
