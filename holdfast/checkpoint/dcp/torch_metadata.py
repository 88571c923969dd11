"""Encodes and decodes `.metadata`, which says what a checkpoint holds and where; also reads the metadata of torch."""

import io
import pathlib
import pickle  # noqa: TID251 what we write torch reads so; of what we read, nothing is made but what is named here
from collections.abc import Iterator, Sequence
from typing import Any

import torch
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import _get_layout

from holdfast.checkpoint.image_layout import (
    ImageItem,
    ImageLayout,
    Path,
    Ranks,
    RecordSpec,
    is_empty_chunk,
    name_of,
    name_tensors,
)
from holdfast.checkpoint.image_record_locations import file_of
from holdfast.checkpoint.pickle_outline import PICKLE_DAMAGE
from holdfast.checkpoint.state_image import StateError

NOT_METADATA = "this is not torch metadata"
_KINDS: tuple[Any, ...] = (
    *(Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata, BytesStorageMetadata),
    *(ChunkStorageMetadata, _StorageInfo, _MEM_FORMAT_ENCODING, torch.Size, _get_layout),
    *(SavePlan, WriteItem, WriteItemType, TensorWriteData),  # Megatron keeps the plans of all ranks beside the rest
)
_SAFE = {(kind.__module__, kind.__qualname__): kind for kind in _KINDS}
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_SAFE |= {(_MEGATRON, "MCoreMetadata"): Metadata, (_MEGATRON, "MCoreSavePlan"): SavePlan}  # which it had before 0.16
_PATHS = ("Path", "PosixPath", "PurePosixPath")  # a checkpoint id
_CHANGEABLE: tuple[Any, ...] = (*_KINDS, *(getattr(pathlib, name) for name in _PATHS))


def encode_metadata(layouts: Sequence[ImageLayout]) -> bytes:
    """Return a checkpoint's `.metadata`, from the layouts of all ranks. It is the same for every step."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    held: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path] = {}
    for name, path, item, place in _list_entries(layouts):
        paths[name] = path
        index = _enter_record(tensors, name, item)
        if index in held:
            raise StateError(f"{held[index].relative_path} and {place.relative_path} both hold {name}")
        if index:
            held[index] = place
    return pickle.dumps(Metadata(tensors, paths, held, StorageMeta()), protocol=2)


def _list_entries(layouts: Sequence[ImageLayout]) -> Iterator[tuple[str, Path, ImageItem, _StorageInfo]]:
    """Yield one entry for each name of each record that a rank owns. An entry has the name, the path in the state dict,
    the record, and the record's place in the rank's data file."""
    named = name_tensors(layouts)
    for layout in layouts:
        for item, at in layout.owned_items():
            place = _StorageInfo(file_of(layout.rank), at, item.length)
            yield from ((name, path, item, place) for name, path in _names_of(item, named))


def decode_metadata(content: bytes) -> Metadata:
    """Decode metadata written by us or by torch; no other class in the pickle is ever created, and none is changed."""
    before = _attributes()
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except PICKLE_DAMAGE as e:
        raise StateError(f"{NOT_METADATA}: {e}") from None
    finally:
        changed = _restore_attributes(before)
    if changed:
        raise StateError(f"{NOT_METADATA}: it changes attributes of {changed}")
    if not isinstance(found, Metadata):
        raise StateError(f"{NOT_METADATA} but a {type(found).__name__}")
    return found


def _attributes() -> list[dict[str, Any]]:
    return [dict(vars(kind)) for kind in _CHANGEABLE]


def _restore_attributes(before: Sequence[dict[str, Any]]) -> str:
    """Undo what a pickle has done to classes that it may name: it can set attributes of whatever it names. Return the
    name of such a class, or ""."""
    changed = ""
    for kind, attributes in zip(_CHANGEABLE, before, strict=True):
        if dict(vars(kind)) != attributes:
            changed = kind.__name__
            for name in vars(kind).keys() - attributes.keys():
                delattr(kind, name)
            for name in [name for name, value in attributes.items() if vars(kind).get(name) is not value]:
                setattr(kind, name, attributes[name])
    return changed


class _Unpickler(pickle.Unpickler):
    """An unpickler that creates only known classes; torch's weights-only one is pure Python and far slower."""

    def find_class(self, module: str, name: str) -> Any:
        if found := _SAFE.get((module, name)):
            return found
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return getattr(pathlib, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _names_of(item: ImageItem, named: dict[tuple[str, Ranks], str]) -> Iterator[tuple[str, Path]]:
    spec = item.spec
    name = named[spec.key, spec.group]
    for path in (spec.path, *spec.aliases):
        key = ".".join(map(str, path))
        yield (key, path) if name == spec.key else (name_of(key, spec.group), (name_of(key, spec.group),))


def _enter_record(
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata], name: str, item: ImageItem
) -> MetadataIndex | None:
    """Add a record to the metadata of the tensor `name`. Return the index under which the metadata lists the record, or
    None for an empty chunk, which is not listed."""
    spec = item.spec
    if not spec.dtype:
        tensors[name] = BytesStorageMetadata()
        return MetadataIndex(name)
    properties = TensorProperties(dtype=getattr(torch, spec.dtype))
    whole = tensors.setdefault(name, TensorStorageMetadata(properties, torch.Size(spec.whole), []))
    if not isinstance(whole, TensorStorageMetadata) or tuple(whole.size) != spec.whole:
        raise StateError(f"ranks that share {name} disagree on its shape or type")
    if is_empty_chunk(spec):
        return None
    whole.chunks.append(ChunkStorageMetadata(torch.Size(spec.start), torch.Size(spec.shape)))
    return MetadataIndex(name, spec.start, len(whole.chunks) - 1)


def single_image_metadata(layout: ImageLayout) -> Metadata:
    """Return the metadata of a single image; `storage_data` maps each record to its number in the image's layout."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {_enter_record(tensors, item.spec.key, item): number for number, item in enumerate(layout.items)}
    return Metadata(tensors, {item.spec.key: item.spec.path for item in layout.items}, places)


def index_of(spec: RecordSpec) -> MetadataIndex:
    return MetadataIndex(spec.key, spec.start) if spec.dtype else MetadataIndex(spec.key)
