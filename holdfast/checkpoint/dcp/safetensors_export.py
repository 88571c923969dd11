"""Exports the weights of a checkpoint as one or more safetensors files."""

import io
import json
import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.checkpoint import dcp
from holdfast.checkpoint.checkpoint_reader import read_manifest, read_metadata, read_ranges
from holdfast.checkpoint.local_storage import LocalStorage
from holdfast.checkpoint.private_export_folder import move_out, private_folder
from holdfast.checkpoint.storage_errors import StorageError
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
    metadata = dcp.decode_metadata(read_metadata(url))
    tensors = {
        key: known for key, known in metadata.state_dict_metadata.items() if isinstance(known, TensorStorageMetadata)
    }
    LocalStorage(str(folder)).make_folder()
    with private_folder(folder) as private:
        names = write_safetensors(
            private,
            {key: _tensor_bytes(known) for key, known in tensors.items()},
            lambda keys: _read_tensors(url, metadata, {key: tensors[key] for key in keys}),
            step=read_manifest(url).step,
            prefix=prefix,
            most_bytes=most_bytes,
        )
        return move_out(private, folder, names)


def write_safetensors(
    folder: str,
    sizes: Mapping[str, int],
    read: Callable[[Sequence[str]], dict[str, torch.Tensor]],
    *,
    step: int,
    prefix: str,
    most_bytes: int,
) -> tuple[str, ...]:
    """Write tensors with these sizes in bytes to files of about `most_bytes` at most, as `read` returns them by their
    names; return the names of the files."""
    from safetensors import SafetensorError  # an extra: nobody needs it to train
    from safetensors.torch import save_file

    chosen = {key: size for key, size in sorted(sizes.items()) if key.startswith(prefix)}
    if not chosen:
        heads = sorted({key.split(".")[0] for key in sizes})
        raise StorageError(f"no tensor's name begins with '{prefix}'; names begin with {', '.join(heads)}")
    groups = list(_group_by_size(chosen, most_bytes))
    names = _file_names(len(groups))
    try:
        for name, group in zip(names, groups, strict=True):
            short = {key.removeprefix(prefix): tensor for key, tensor in read(group).items()}
            save_file(short, f"{folder}/{name}", metadata={"format": "pt", "step": str(step)})
        if len(groups) > 1:
            places = {key.removeprefix(prefix): name for name, keys in zip(names, groups, strict=True) for key in keys}
            index = {"metadata": {"total_size": sum(chosen.values())}, "weight_map": places}
            Path(folder, _INDEX).write_text(json.dumps(index, indent=1) + "\n")
            names.append(_INDEX)
    except (OSError, SafetensorError) as e:
        raise StorageError(f"safetensors cannot be written: {e}") from None
    return tuple(names)


def _tensor_bytes(known: TensorStorageMetadata) -> int:
    return math.prod(known.size) * known.properties.dtype.itemsize


def _group_by_size(sizes: Mapping[str, int], most_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    total = 0
    for key, size in sizes.items():
        if group and total + size > most_bytes:
            yield group
            group, total = [], 0
        group.append(key)
        total += size
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
