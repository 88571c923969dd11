"""Says what is wrong with files that others write: torch.save, safetensors, JSON, torch.distributed.checkpoint."""

import io
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from holdfast.checkpoint.pickle_outline import Blank, OutlineError, outline_pickle

_HEAD_BYTES = 8  # of a safetensors file: the length of its header
_MOST_HEADER_BYTES = 100_000_000
METADATA = ".metadata"
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
_ZIPPED = b"PK"  # as torch.save writes it


class RecordPlace(NamedTuple):
    """Where a record of a checkpoint of torch.distributed.checkpoint lies."""

    file: str
    offset: int
    length: int


def first_fault(paths: Iterable[Path]) -> str:
    """Return what is wrong with the first of these files that is missing, cut short or damaged; else empty."""
    return next((f"{path.name} {fault}" for path in paths if (fault := _file_fault(path))), "")


def distcp_fault(folder: Path) -> str:
    """Return what is wrong with a checkpoint of torch.distributed.checkpoint; its `.metadata` is written last."""
    try:
        for place in sorted(read_places(folder)):
            with (folder / place.file).open("rb") as file:
                file.seek(place.offset)
                record = file.read(place.length)
            if len(record) < place.length:
                return f"{place.file} is cut short"
            if record.startswith(_ZIPPED) and not _is_whole_archive(io.BytesIO(record)):
                return f"{place.file} is damaged"
    except FileNotFoundError as e:
        return f"{Path(str(e.filename)).name} is missing"
    except (OutlineError, *_DAMAGE) as e:
        return f"it is not whole ({e})"
    return ""


def read_places(folder: Path) -> list[RecordPlace]:
    """Return the records that the folder's `.metadata` names; OutlineError if that file is not torch's metadata."""
    metadata = outline_pickle((folder / METADATA).read_bytes())
    held = metadata.state.get("storage_data") if isinstance(metadata, Blank) else None
    if not isinstance(held, dict):
        raise OutlineError("this is not torch metadata")
    return [_read_place(one) for one in held.values()]


def _read_place(one: object) -> RecordPlace:
    told = one.state if isinstance(one, Blank) else {}
    file, offset, length = told.get("relative_path"), told.get("offset"), told.get("length")
    if not (isinstance(file, str) and isinstance(offset, int) and isinstance(length, int) and min(offset, length) >= 0):
        raise OutlineError("torch metadata with a record that lies nowhere")
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise OutlineError(f"torch metadata with a record outside of the checkpoint: {file!r}")
    return RecordPlace(file, offset, length)


def end_fault(path: Path) -> str:
    """Return whether a file of torch.save is missing or cut short, in words, by a look at its end; else empty."""
    try:
        with zipfile.ZipFile(path):
            return ""
    except FileNotFoundError:
        return "is missing"
    except _DAMAGE as e:
        return f"is not whole ({e})"


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
