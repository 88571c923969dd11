"""Converts a state of tensors and values to an image and back; flattens a state once, copies it at every snapshot."""

import contextlib
import ctypes
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import IO, Any, NamedTuple, cast

import msgspec
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.checkpoint.image_layout import EXTRA, ImageLayout, Path, Ranks, RecordSpec
from holdfast.checkpoint.memory_copy import Move

KNOWN_RECORDS = 4096  # kinds of tensors whose records are remembered
_ROOM_BYTES = 64  # values are given room in such steps
_PLAIN = frozenset((type(None), int, float, bool, str, bytes))

State = Mapping[str, object]


class StateError(Exception):
    """Says in one sentence what cannot be saved, or does not fit the saved state."""


class TensorHolders(NamedTuple):
    """The ranks that hold a tensor."""

    group: Ranks  # together
    replicas: Ranks  # the very chunk that this rank has
    alike: bool = True  # at every step


Holders = Callable[[Path], TensorHolders]  # of what is no DTensor, as that knows by itself


class FlatState(NamedTuple):
    """A flattened state dict: a spec for each record, and the local tensors and values by record key."""

    specs: list[RecordSpec]
    objects: dict[str, object]


def flatten_state(state: State, holders: Holders) -> FlatState:
    """Flatten a nested state dict into records named as torch.distributed.checkpoint names them."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(cast(dict[str, object], state), is_coordinator=True)
    plan = planner.create_local_plan()
    paths = cast(dict[str, Path], plan.planner_data)
    specs: dict[str, RecordSpec] = {}
    objects: dict[str, object] = {}
    same: dict[tuple[object, ...], str] = {}
    for write in plan.items:
        key, found = write.index.fqn, planner.state_dict[write.index.fqn]
        held = _holders_of(found) if isinstance(found, DTensor) else holders(paths[key])
        thing = check_tensor(key, local_tensor(found)) if isinstance(found, torch.Tensor) else found
        first = same.setdefault(_memory_key(thing, write), key)
        if first != key:
            specs[first] = msgspec.structs.replace(specs[first], aliases=(*specs[first].aliases, paths[key]))
            continue
        if key in specs:
            raise StateError(f"{key} is a {type(found).__name__} of several chunks, which cannot be saved")
        specs[key] = _make_spec(write, paths[key], thing, held)
        objects[key] = thing
    return FlatState(list(specs.values()), objects)


def extra_spec(size: int, rank: int, world: int) -> RecordSpec:
    """Return the spec of a rank's extra record. Its bytes belong to no tensor, and all ranks have equally many."""
    return RecordSpec(
        key=EXTRA,
        path=(EXTRA,),
        bytes=size,
        dtype="uint8",
        shape=(1, size),
        whole=(world, size),
        start=(rank, 0),
        group=tuple(range(world)),
        replicas=(rank,),
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without a copy and detached from autograd."""
    return bare_local(tensor).detach()


def bare_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor. It is not detached: detaching would create an object at every step."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return a memoryview of a host tensor of bytes."""
    if not flat.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    memory.owner = flat  # type: ignore[attr-defined]  # which lives as long as the view does
    return memoryview(memory).cast("B")


def encode_value(value: object) -> bytes:
    """Encode a value in torch.save's legacy format; unlike the zip format, it may be followed by other bytes."""
    sink = io.BytesIO()
    torch.save(value, sink, _use_new_zipfile_serialization=False)
    return sink.getvalue()


def decode_value(content: bytes | memoryview) -> object:
    """Decode a value; only plain values, tensors and arrays are ever created from the bytes."""
    with torch.serialization.safe_globals([bytes, *_array_kinds()]):  # empty bytes are written as a call of bytes
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _array_kinds() -> list[Any]:
    """Return the functions and classes that a pickled numpy array or scalar names; empty if numpy is not imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    rebuild, scalar = numpy.ndarray.__reduce__(numpy.zeros(1))[0], numpy.float64(0).__reduce__()[0]
    return [rebuild, scalar, numpy.ndarray, numpy.dtype, *{type(numpy.dtype(code)) for code in numpy.typecodes["All"]}]


def record_sizes(spec: RecordSpec) -> tuple[int, int]:
    """Return two sizes of a record: the bytes before its payload, and all bytes."""
    record = _frame_spec(spec)
    return len(record.head), len(record.head) + spec.bytes + len(record.tail)


class StateImage:
    """An image in memory, as tensors and values. `places` overrides the layout's offsets and may leave items out."""

    def __init__(self, layout: ImageLayout, memory: memoryview, places: Mapping[int, int] | None = None) -> None:
        self.layout = layout
        self.memory = memory
        self._places = places or {index: item.payload for index, item in enumerate(layout.items)}
        flat = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
        self.payloads = {index: shape_payload(flat, layout.items[index].spec, at) for index, at in self._places.items()}
        self._ways = {index: (view.data_ptr(), view.nbytes) for index, view in self.payloads.items()}
        self._written: dict[int, str] = {}
        self._known: dict[int, object] = {}  # by which most values are found unchanged without a look at what they show
        self._reach: Callable[[int], None] | None = None
        self._fetch: Callable[[int, torch.Tensor], None] | None = None
        self._finish: Callable[[], None] | None = None

    def use_reach(self, reach: Callable[[int], None]) -> None:
        """Set a function that waits until the GPU can read up to an offset. It is called before a tensor is read."""
        self._reach = reach

    @contextlib.contextmanager
    def fetched_by(self, fetch: Callable[[int, torch.Tensor], None], finish: Callable[[], None]) -> Iterator[None]:
        """Return a context in which `fetch` fills GPU tensors faster than a copy from the image would. `settle` calls
        `finish`, which waits until these tensors are filled."""
        self._fetch, self._finish = fetch, finish
        try:
            yield
        finally:
            self._fetch = self._finish = None

    def settle(self) -> None:
        """Wait until all fetched tensors are filled."""
        if self._finish:
            self._finish()

    def write_frames(self) -> None:
        """Write the bytes that torch puts around payloads, which are the same in every snapshot."""
        for item in self.layout.items:
            record, after = _frame_spec(item.spec), item.payload + item.spec.bytes
            self.memory[item.offset : item.payload] = record.head
            self.memory[after : item.end] = record.tail
        self.forget_contents()

    def forget_contents(self) -> None:
        """Forget which values the image holds, because another process wrote into it."""
        self._written.clear()
        self._known.clear()

    def put_tensor(self, index: int, tensor: torch.Tensor) -> Move | None:
        """Copy a tensor into the image. If it is contiguous on the CPU, only return the move for the caller to make."""
        to, size = self._ways[index]
        if tensor.nbytes != size:  # its memory was exchanged; what is copied blindly must fit
            raise StateError(f"{self.layout.items[index].spec.key} has another size than before")
        if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
            return to, tensor.data_ptr(), size
        self.payloads[index].copy_(tensor)
        return None

    def get_tensor(self, index: int, tensor: torch.Tensor) -> Move | None:
        """Copy an item into a tensor. If that is contiguous on the CPU, only return the move for the caller to make."""
        if tensor.is_cpu and tensor.is_contiguous():
            start, size = self._ways[index]
            return tensor.data_ptr(), start, size
        if self._fetch and tensor.is_contiguous():
            self._fetch(self._places[index], tensor)
            return None
        if self._reach:
            self._reach(self.layout.items[index].end)
        tensor.copy_(self.payloads[index], non_blocking=True)  # whoever reads a whole image waits for all at once
        return None

    def put_value(self, index: int, value: object) -> None:
        """Write a value, unless the image already holds it."""
        known = self._known.get(index, self)
        if known is value or (type(value) is list and known == value):
            return
        plain = repr(value) if _is_plain(value) else None
        if plain is None or self._written.get(index) != plain:
            self.put_bytes(index, encode_value(value))
        if plain is not None:
            self._written[index] = plain
        if type(value) in _PLAIN:
            self._known[index] = value
        elif type(value) is list and all(type(one) is str for one in value):  # of other kinds, equals may differ
            self._known[index] = value.copy()

    def get_value(self, index: int) -> object:
        return decode_value(self.payload_bytes(index))

    def put_bytes(self, index: int, content: bytes) -> None:
        spec, at = self.layout.items[index].spec, self._places[index]
        if len(content) > spec.bytes:
            raise StateError(f"{spec.key} has outgrown its room of {spec.bytes} bytes")
        self.memory[at : at + len(content)] = content

    def payload_bytes(self, index: int) -> memoryview:
        at = self._places[index]
        return self.memory[at : at + self.layout.items[index].spec.bytes]


def shape_payload(flat: torch.Tensor, spec: RecordSpec, at: int) -> torch.Tensor:
    """Return the payload at this offset as a view with the record's dtype and shape."""
    if spec.dtype and not spec.bytes:  # it lies nowhere
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=flat.device)
    raw = flat[at : at + spec.bytes]
    return raw.view(getattr(torch, spec.dtype)).view(spec.shape) if spec.dtype else raw


def item_slices(layout: ImageLayout) -> list[tuple[slice, ...] | None]:
    """Return one entry for each item: the item's slices of this rank's tensor, or None for the whole tensor."""
    first: dict[str, tuple[int, ...]] = {}
    count: dict[str, int] = {}
    for item in layout.items:
        key, start = item.spec.key, item.spec.start
        first[key] = min(first.get(key, start), start)
        count[key] = count.get(key, 0) + 1
    return [
        tuple(slice(s - f, s - f + n) for s, f, n in zip(i.spec.start, first[i.spec.key], i.spec.shape, strict=True))
        if count[i.spec.key] > 1
        else None
        for i in layout.items
    ]


class RecordFrame(NamedTuple):
    head: bytes
    tail: bytes


class _FrameSink(io.RawIOBase):
    """A file that records what torch.save writes, except the payload, which torch skips by a seek."""

    def __init__(self) -> None:
        self.pieces = [io.BytesIO()]

    def write(self, content: "memoryview | bytes") -> int:  # type: ignore[override]
        return self.pieces[-1].write(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.pieces.append(io.BytesIO())
        return offset


@lru_cache(maxsize=KNOWN_RECORDS)
def record_frame(dtype: str, shape: tuple[int, ...]) -> RecordFrame:
    """Return the bytes that torch writes before and after the payload of a tensor with this dtype and shape."""
    sink = _FrameSink()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=getattr(torch, dtype)), cast(IO[bytes], sink))
    head, *rest = (piece.getvalue() for piece in sink.pieces)
    return RecordFrame(head, b"".join(rest))


def _frame_spec(spec: RecordSpec) -> RecordFrame:
    return record_frame(spec.dtype, spec.shape) if spec.dtype else RecordFrame(b"", b"")


def _make_spec(write: WriteItem, path: Path, thing: object, held: TensorHolders) -> RecordSpec:
    key, named = write.index.fqn, held._asdict()
    if write.type == WriteItemType.BYTE_IO:
        return RecordSpec(key=key, path=path, bytes=_value_room(key, thing), **named)
    tensor, chunk = cast(torch.Tensor, thing), write.tensor_data
    assert chunk
    return RecordSpec(
        key=key,
        path=path,
        bytes=tensor.nbytes,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(chunk.chunk.sizes),
        whole=tuple(chunk.size),
        start=tuple(chunk.chunk.offsets),
        **named,
    )


def check_tensor(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Raise StateError if a tensor's values cannot be copied from its memory; otherwise pass the tensor through."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise StateError(f"{key} is a tensor of a kind that cannot be saved: {tensor.layout}, {tensor.dtype}")
    thing: object = tensor
    if is_traceable_wrapper_subclass(thing) or not _has_memory(tensor):
        raise StateError(
            f"{key} is a {type(tensor).__name__}, which has no memory of its own: give the tensors that it is made of "
            "in a state_dict= of your own"
        )
    return tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own. Some subclasses have none and only stand for other tensors."""
    if tensor.is_meta or not tensor.nbytes:
        return True
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:  # torch refuses to tell
        return False


def _value_room(key: str, value: object) -> int:
    """Return how many bytes to reserve for a value: twice its size. Raises StateError if it cannot be decoded again."""
    try:
        content = encode_value(value)
        decode_value(content)
    except (torch.serialization.pickle.PickleError, TypeError, AttributeError):
        raise StateError(f"{key} is a {type(value).__name__}: only plain values and tensors can be saved") from None
    return -(-2 * len(content) // _ROOM_BYTES) * _ROOM_BYTES


def _memory_key(thing: object, write: WriteItem) -> tuple[object, ...]:
    """Return a key that is equal for two names of the same memory."""
    if isinstance(thing, torch.Tensor) and thing.device.type != "meta" and thing.nbytes and write.tensor_data:
        chunk = write.tensor_data.chunk
        return thing.data_ptr(), thing.dtype, thing.shape, thing.stride(), chunk.offsets, write.tensor_data.size
    return (write.index.fqn,)


def _holders_of(tensor: DTensor) -> TensorHolders:
    mesh = tensor.device_mesh
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise StateError("a tensor that is a partial sum cannot be saved")
    ranks = mesh.mesh
    replicas = ranks
    for dim, (placement, place) in enumerate(zip(tensor.placements, mesh.get_coordinate() or (), strict=False)):
        if not isinstance(placement, Replicate):
            replicas = replicas.narrow(dim, place, 1)
    return TensorHolders(_sorted_ranks(ranks), _sorted_ranks(replicas))


def _sorted_ranks(ranks: torch.Tensor) -> Ranks:
    return tuple(sorted(int(rank) for rank in ranks.flatten()))


def _is_plain(value: object) -> bool:
    """Return whether repr() determines the value completely."""
    if type(value) in (tuple, list):
        several = cast(Sequence[object], value)
        return _PLAIN.issuperset(map(type, several)) or all(map(_is_plain, several))
    return type(value) in _PLAIN
