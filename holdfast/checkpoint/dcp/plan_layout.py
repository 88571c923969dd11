"""Lays out the items of a torch save plan in an image."""

import io
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from holdfast.checkpoint import snapshot_metadata_record
from holdfast.checkpoint.dcp.torch_metadata import index_of
from holdfast.checkpoint.image_layout import EXTRA, ImageLayout, Ranks, RecordSpec, arrange_image
from holdfast.checkpoint.state_image import StateError, check_tensor, extra_spec, local_tensor, record_sizes

_SPARE_BYTES = 32 << 10
_END = b"HFEND001"  # after the room of a value come this and its length

Things = dict[MetadataIndex, Any]  # tensors and encoded values


def rank_and_world() -> tuple[int, int]:
    """Return this rank and the world size; (0, 1) without a process group."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def check_items(items: Sequence[WriteItem]) -> None:
    """Raise StateError for tensors that cannot be saved, before anything is written."""
    for item in items:
        kind = item.tensor_data and item.tensor_data.properties
        if kind and (kind.layout != torch.strided or (is_quantized(kind.dtype) and not _is_whole(item))):
            raise StateError(
                f"{item.index.fqn} cannot be saved: its kind is not supported: {kind.layout}, {kind.dtype}"
            )


def is_quantized(dtype: torch.dtype) -> bool:
    return str(dtype).startswith(("torch.qint", "torch.quint"))


def _is_whole(item: WriteItem) -> bool:
    return item.tensor_data is not None and item.tensor_data.chunk.sizes == item.tensor_data.size


def resolve_items(items: Sequence[WriteItem], planner: SavePlanner) -> tuple[list[WriteItem], Things]:
    """Return the items and what they hold. A quantized tensor becomes a value, so that its scale comes back, too: a
    load that copied its numbers into another tensor would leave that tensor's scale as it is."""
    found, things = [], Things()
    for item in items:
        thing = planner.resolve_data(item)
        if isinstance(thing, torch.Tensor) and is_quantized(thing.dtype):
            torch.save(thing.detach().clone(), content := io.BytesIO())
            item, thing = WriteItem(value_index(item), WriteItemType.BYTE_IO), content
        found.append(item)
        things[item.index] = thing
    return found, things


def value_index(item: WriteItem) -> MetadataIndex:
    """Return the index under which this item is stored."""
    chunk = item.tensor_data
    return MetadataIndex(item.index.fqn) if chunk and is_quantized(chunk.properties.dtype) else item.index


def arrange_plan(
    items: Sequence[WriteItem], things: Things, owned: Collection[MetadataIndex], last: ImageLayout | None, at: Ranks
) -> ImageLayout:
    """Lay out these items in an image. Other ranks write the items that are not in `owned`. `at` is (rank, world).

    Returns `last` again if all items still fit into it, because a new layout needs new memory.
    """
    rank, world = at
    specs = [_make_spec(item, things[item.index], (rank,) if item.index in owned else (-1, rank)) for item in items]
    rooms = {index_of(item.spec): item.spec for item in last.items if item.spec.key != EXTRA} if last else {}
    alike = last and (last.rank, last.world, len(rooms)) == (rank, world, len(specs))
    if last and alike and all(_fits_room(spec, rooms.get(index_of(spec)), things) for spec in specs):
        return last
    size = len(pack_layout(arrange_image(specs, record_sizes, rank=rank, world=world)))
    extra = extra_spec(-(-2 * size // _SPARE_BYTES) * _SPARE_BYTES, 0, 1)
    return arrange_image([extra, *specs], record_sizes, rank=rank, world=world, form=f"torch {torch.__version__}")


def pack_layout(layout: ImageLayout, step: int = 0) -> bytes:
    return snapshot_metadata_record.pack_metadata(
        snapshot_metadata_record.ImageMetadata(step=step, layout=msgspec.msgpack.encode(layout))
    )


def pad_value(value: bytes, room: int) -> bytes:
    """Pad a value with zeros to `room` bytes, the last of which hold the value's length."""
    return value.ljust(room - len(_END) - 8, b"\0") + _END + len(value).to_bytes(8, "little")


def unpad_value(record: memoryview) -> memoryview:
    """Return the value without its padding, or the whole record if it has no length at its end."""
    size = int.from_bytes(record[-8:], "little")
    is_ours = record[-len(_END) - 8 : -8] == _END and size <= len(record) - len(_END) - 8
    return record[:size] if is_ours else record


def _fits_room(spec: RecordSpec, room: RecordSpec | None, things: Things) -> bool:
    if room is None or spec.dtype:
        return spec == room
    same = msgspec.structs.replace(spec, bytes=room.bytes) == room
    return same and len(things[index_of(spec)].getbuffer()) + len(_END) + 8 <= room.bytes


def _make_spec(item: WriteItem, thing: Any, replicas: Ranks) -> RecordSpec:
    key, chunk = item.index.fqn, item.tensor_data
    if chunk is None:
        size = len(thing.getbuffer()) + len(_END) + 8
        room = -(-min(2 * size, size + _SPARE_BYTES) // 64) * 64  # torch finds a value before as many other bytes
        return RecordSpec(key=key, path=(key,), bytes=room, group=replicas[-1:], replicas=replicas, alike=False)
    return RecordSpec(
        key=key,
        path=(key,),
        bytes=check_tensor(key, local_tensor(thing)).nbytes,
        dtype=str(thing.dtype).removeprefix("torch."),
        shape=tuple(chunk.chunk.sizes),
        whole=tuple(chunk.size),
        start=tuple(chunk.chunk.offsets),
        group=replicas[-1:],
        replicas=replicas,
        alike=False,
    )
