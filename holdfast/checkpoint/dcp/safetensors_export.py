"""Exports the weights of a checkpoint as one or more safetensors files."""

import io
import json
import math
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.checkpoint import dcp
from holdfast.checkpoint.checkpoint_load import read_manifest, read_metadata, read_ranges
from holdfast.checkpoint.local_storage import LocalStorage
from holdfast.checkpoint.manifest import StorageError
from holdfast.checkpoint.verified_block_reads import PartPiece

_INDEX = "model.safetensors.index.json"  # as loaders of safetensors expect it
WEIGHTS = "model."  # what their names begin with; it is left away
_FILE = re.compile(r"__(\d+)_0\.distcp")
_PAGE_BYTES = mmap.PAGESIZE


def export_safetensors(
    url: str, folder: Path, *, prefix: str = WEIGHTS, most_bytes: int = 5 * 10**9
) -> tuple[Path, ...]:
    """Write all tensors whose names begin with `prefix`, in files of about `most_bytes` at most; return the files.

    Every byte is verified as it is read, and only one file's tensors are in memory at a time.
    """
    from safetensors import SafetensorError  # an extra: nobody needs it to train
    from safetensors.torch import save_file

    metadata = dcp.decode_metadata(read_metadata(url))
    tensors = _find_tensors(metadata, prefix)
    LocalStorage(str(folder)).make_folder()
    groups = list(_group_by_size(tensors, most_bytes))
    names = _file_names(len(groups))
    if taken := [name for name in names if (folder / name).exists()]:
        raise StorageError(f"{folder / taken[0]} exists already")
    step = str(read_manifest(url).step)
    for name, group in zip(names, groups, strict=True):
        whole = _read_tensors(url, metadata, {key: tensors[key] for key in group})
        short = {key.removeprefix(prefix): tensor for key, tensor in whole.items()}
        try:
            with _private_folder(folder) as private:
                save_file(short, f"{private}/{name}", metadata={"format": "pt", "step": step})
                os.replace(f"{private}/{name}", folder / name)
        except (OSError, SafetensorError) as e:
            raise StorageError(f"{folder / name} cannot be written: {e}") from None
    files = [folder / name for name in names]
    if len(groups) > 1:
        files.append(_write_index(folder, dict(zip(names, groups, strict=True)), tensors, prefix))
    return tuple(files)


@contextmanager
def _private_folder(folder: Path) -> Iterator[str]:
    """Make a folder that only we can write to, and yield a path to it that nobody else can redirect."""
    with TemporaryDirectory(dir=folder, prefix=".export-") as path:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise PermissionError(f"somebody replaced {path}")
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)


def _find_tensors(metadata: Metadata, prefix: str) -> dict[str, TensorStorageMetadata]:
    found = {
        key: known
        for key, known in sorted(metadata.state_dict_metadata.items())
        if key.startswith(prefix) and isinstance(known, TensorStorageMetadata)
    }
    if not found:
        heads = sorted({key.split(".")[0] for key in metadata.state_dict_metadata})
        raise StorageError(f"no tensor's name begins with '{prefix}'; names begin with {', '.join(heads)}")
    return found


def _tensor_bytes(known: TensorStorageMetadata) -> int:
    return math.prod(known.size) * known.properties.dtype.itemsize


def _group_by_size(tensors: dict[str, TensorStorageMetadata], most_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for key, known in tensors.items():
        if group and size + _tensor_bytes(known) > most_bytes:
            yield group
            group, size = [], 0
        group.append(key)
        size += _tensor_bytes(known)
    yield group


def _file_names(count: int) -> list[str]:
    """Return the file names that loaders of safetensors expect."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _read_tensors(url: str, metadata: Metadata, tensors: dict[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
    """Return the tensors, assembled from the chunks that the ranks wrote."""
    chunks = [(key, chunk) for key, known in tensors.items() for chunk in known.chunks]
    pieces = _find_pieces(metadata, [MetadataIndex(key, chunk.offsets) for key, chunk in chunks])
    size = sum(-(-piece.bytes // _PAGE_BYTES) * _PAGE_BYTES for piece in pieces)
    memory = memoryview(mmap.mmap(-1, max(1, size)))
    read_ranges(url, pieces, memory)
    whole = {key: torch.empty(known.size, dtype=known.properties.dtype) for key, known in tensors.items()}
    for (key, chunk), piece in zip(chunks, pieces, strict=True):
        record = io.BytesIO(memory[piece.to : piece.to + piece.bytes])
        place = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[key][place] = torch.load(record, map_location="cpu", weights_only=True)
    return whole


def _find_pieces(metadata: Metadata, indices: Sequence[MetadataIndex]) -> list[PartPiece]:
    pieces: list[PartPiece] = []
    to = 0
    for index in indices:
        place = metadata.storage_data.get(index)
        rank = _FILE.fullmatch(place.relative_path) if place else None
        if place is None or rank is None:
            raise StorageError(f"the metadata does not say where {index.fqn} is")
        pieces.append(PartPiece(rank=int(rank[1]), start=place.offset, bytes=place.length, to=to))
        to += -(-place.length // _PAGE_BYTES) * _PAGE_BYTES
    return pieces


def _write_index(
    folder: Path, groups: dict[str, list[str]], tensors: dict[str, TensorStorageMetadata], prefix: str
) -> Path:
    """Write the index that maps tensors to files; return its path."""
    places = {key.removeprefix(prefix): name for name, keys in groups.items() for key in keys}
    total = sum(map(_tensor_bytes, tensors.values()))
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n"
    LocalStorage(str(folder)).put_file(_INDEX, index.encode())
    return folder / _INDEX
