"""Says what is wrong with files that others write: torch.save, safetensors, JSON, torch.distributed.checkpoint."""

import io
import json
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from holdfast.checkpoint.pickle_outline import Blank, OutlineError, outline_pickle
from holdfast.linux.regular_files import open_file

_HEAD_BYTES = 8  # of a safetensors file: the length of its header
_MOST_HEADER_BYTES = 100_000_000
_MOST_JSON_BYTES, _MOST_METADATA_BYTES = 256 << 20, 2 << 30  # of a file that is read whole; whoever writes may lie
_PIECE_BYTES = 8 << 20
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
    MemoryError,
    zipfile.BadZipFile,
)
_ZIPPED = b"PK"  # as torch.save writes it


class RecordPlace(NamedTuple):
    """Where a record of a checkpoint of torch.distributed.checkpoint lies."""

    file: str
    offset: int
    length: int


class _RecordFile(io.RawIOBase):
    """One record of a file, as a file of its own; a record may be larger than memory."""

    def __init__(self, file: BinaryIO, place: RecordPlace) -> None:
        self._file, self._place, self._at = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.length}[whence]
        if at < 0:
            raise ValueError(f"there is nothing at {at}")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._place.length - self._at)
        self._file.seek(self._place.offset + min(self._at, self._place.length))
        found = self._file.read(min(len(buffer), left, _PIECE_BYTES))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def first_fault(paths: Iterable[Path]) -> str:
    """Return the first fault found in these files, such as a missing, short or damaged file; "" if there is none."""
    return next((f"{path.name} {fault}" for path in paths if (fault := _file_fault(path))), "")


def distcp_fault(folder: Path) -> str:
    """Return what is wrong with a checkpoint of torch.distributed.checkpoint; "" if all its records are whole."""
    try:
        for place in sorted(read_places(folder)):
            if fault := _record_fault(folder, place):
                return f"{place.file} {fault}"
    except FileNotFoundError as e:
        return f"{Path(str(e.filename)).name} is missing"
    except (OutlineError, *_DAMAGE) as e:
        return f"it is not whole ({e})"
    return ""


def _record_fault(folder: Path, place: RecordPlace) -> str:
    with open_file(folder / place.file) as file:
        if os.fstat(file.fileno()).st_size < place.offset + place.length:
            return "is cut short"
        return "" if _is_whole_record(io.BufferedReader(_RecordFile(file, place))) else "is damaged"


def _is_whole_record(record: io.BufferedReader) -> bool:
    """Return whether a record is intact. A record of torch.save has checksums; any other is only read to its end."""
    if record.peek(len(_ZIPPED)).startswith(_ZIPPED):
        return _is_whole_archive(record)
    while record.read(_PIECE_BYTES):
        pass
    return True


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a file. Raise OSError if it is no regular file or has more than `most` bytes."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(f"{path.name} has {size:,} bytes, and no such file has more than {most:,}: it is not read")
        return file.read(most)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raise OSError or ValueError if it cannot be read."""
    try:
        return json.loads(read_small(path, _MOST_JSON_BYTES))
    except RecursionError as e:
        raise ValueError(str(e)) from None


def read_places(folder: Path) -> list[RecordPlace]:
    """Return the records that the folder's `.metadata` names. Raise OutlineError if that file is not torch's."""
    return [_read_place(one) for one in _read_metadata(folder, "storage_data").values()]


def read_names(folder: Path) -> list[str]:
    """Return the names of all that is in a checkpoint. Raise OutlineError if its `.metadata` is not torch's."""
    return [str(name) for name in _read_metadata(folder, "state_dict_metadata")]


def _read_metadata(folder: Path, field: str) -> dict[object, object]:
    metadata = outline_pickle(read_small(folder / METADATA, _MOST_METADATA_BYTES))
    held = metadata.state.get(field) if isinstance(metadata, Blank) else None
    if not isinstance(held, dict):
        raise OutlineError("this is not torch metadata")
    return held


def _read_place(one: object) -> RecordPlace:
    told = one.state if isinstance(one, Blank) else {}
    file, offset, length = told.get("relative_path"), told.get("offset"), told.get("length")
    if not (isinstance(file, str) and isinstance(offset, int) and isinstance(length, int) and min(offset, length) >= 0):
        raise OutlineError("torch metadata with a record that lies nowhere")
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise OutlineError(f"torch metadata with a record outside of the checkpoint: {file!r}")
    return RecordPlace(file, offset, length)


def end_fault(path: Path) -> str:
    """Return why a file of torch.save is not whole, or "is missing"; "" if the end of the file is as it should be."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file):
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
            read_json(path)
            return ""
        with open_file(path) as file:
            return "" if _is_whole_archive(file) else "is damaged"
    except _DAMAGE as e:
        return f"is not whole ({e})"


def _is_whole_archive(file: IO[bytes]) -> bool:
    """Return whether an archive of torch.save is uncompressed, as torch writes it, and its checksums are right."""
    with zipfile.ZipFile(file) as archive:
        is_plain = all(one.compress_type == 0 and one.compress_size == one.file_size for one in archive.infolist())
        return is_plain and archive.testzip() is None


def _safetensors_fault(path: Path) -> str:
    """Return how the file's size contradicts its header, or ""; the format has no checksums."""
    with open_file(path) as file:
        size = int.from_bytes(file.read(_HEAD_BYTES), "little")
        if not 0 < size <= _MOST_HEADER_BYTES:
            return "has no header"
        told = json.loads(file.read(size))
    end = max((tensor["data_offsets"][1] for name, tensor in told.items() if name != "__metadata__"), default=0)
    return "" if path.stat().st_size == _HEAD_BYTES + size + end else "is cut short"
