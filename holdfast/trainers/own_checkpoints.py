"""Finds the newest whole checkpoint that a trainer has written itself; a kill may have left half of one."""

import io
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from holdfast.checkpoint.dcp import decode_metadata
from holdfast.checkpoint.state_image import StateError
from holdfast.client.checkpointing.rank_collectives import RankWorld

_HEAD_BYTES = 8  # of a safetensors file: the length of its header
_MOST_HEADER_BYTES = 100_000_000
_DAMAGE = (  # what reading a damaged file raises, whose directory or header may say anything
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RuntimeError,
    zipfile.BadZipFile,
)


class OwnCheckpoint(NamedTuple):
    """A checkpoint that a trainer has written by itself."""

    step: int
    path: str


def find_own_checkpoint(folder: Path, name: str, find_fault: Callable[[Path], str]) -> OwnCheckpoint | None:
    """Return the newest whole checkpoint that every node sees; a collective.

    `name` is a pattern for checkpoints' names, its first group the number. `find_fault` returns why a checkpoint is not
    whole. It reads every byte, so none is looked at that is older than a whole one.
    """
    world = RankWorld()
    looks = os.environ.get("LOCAL_RANK", "0") == "0"  # the other ranks of a node would see the same
    listed = world.gather_all(list_newest_first(folder, name) if looks else None)
    seen = [set(all_of_node) for all_of_node in listed if all_of_node is not None]
    for one in sorted(set.union(*seen), reverse=True):
        faults = ["not every node sees it"]
        if all(one in all_of_node for all_of_node in seen):
            faults = [fault for fault in world.gather_all(find_fault(Path(one.path)) if looks else "") if fault]
        if not faults:
            return one
        if world.rank == 0:
            say_left_out(one.path, faults[0])
    return None


def list_newest_first(folder: Path, name: str) -> list[OwnCheckpoint]:
    """Return all checkpoints, whole or not, those with the highest numbers first."""
    named = [(re.fullmatch(name, path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((OwnCheckpoint(int(found[1]), str(path)) for found, path in named if found), reverse=True)


def say_left_out(path: str, fault: str) -> None:
    print(f"holdfast: {path} is left out: {fault}", file=sys.stderr, flush=True)


def first_fault(paths: Iterable[Path]) -> str:
    """Return what is wrong with the first of these files that is missing, cut short or damaged; else empty."""
    return next((f"{path.name} {fault}" for path in paths if (fault := _file_fault(path))), "")


def distcp_fault(folder: Path) -> str:
    """Return what is wrong with a checkpoint of torch.distributed.checkpoint; its `.metadata` is written last."""
    try:
        storage = decode_metadata((folder / ".metadata").read_bytes()).storage_data or {}
        for place in sorted(storage.values(), key=lambda place: (place.relative_path, place.offset)):
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                record = file.read(place.length)
            if len(record) < place.length:
                return f"{place.relative_path} is cut short"
            if record.startswith(b"PK") and not _is_whole_archive(io.BytesIO(record)):
                return f"{place.relative_path} is damaged"
    except FileNotFoundError as e:
        return f"{Path(str(e.filename)).name} is missing"
    except (StateError, *_DAMAGE) as e:
        return f"it is not whole ({e})"
    return ""


def _file_fault(path: Path) -> str:
    try:
        if not path.is_file():
            return "is missing"
        if path.suffix == ".safetensors":
            return _safetensors_fault(path)
        if path.suffix == ".json":
            json.loads(path.read_bytes())
            return ""
        return "" if _is_whole_archive(path) else "is damaged"
    except _DAMAGE as e:
        return f"is not whole ({e})"


def _is_whole_archive(file: Path | io.BytesIO) -> bool:
    """Return whether the checksums are right in an archive of torch.save, which compresses nothing."""
    with zipfile.ZipFile(file) as archive:
        is_plain = all(one.compress_type == 0 and one.compress_size == one.file_size for one in archive.infolist())
        return is_plain and archive.testzip() is None


def _safetensors_fault(path: Path) -> str:
    """Return how the file's size contradicts its header, or ""; the format has no checksums."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_HEAD_BYTES), "little")
        if not 0 < size <= _MOST_HEADER_BYTES:
            return "has no header"
        told = json.loads(file.read(size))
    end = max((tensor["data_offsets"][1] for name, tensor in told.items() if name != "__metadata__"), default=0)
    return "" if path.stat().st_size == _HEAD_BYTES + size + end else "is cut short"
