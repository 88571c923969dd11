"""Finds and verifies checkpoints that trainers write by themselves: DeepSpeed, Megatron, TorchTitan and other DCP.

There are two checks. The quick one tests whether all files are there and complete, from the sizes and last bytes of the
files. The thorough one reads every byte that has a checksum: files of torch.save are archives with a CRC-32 of each
record. Neither check needs torch or the trainer.
"""

import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.checkpoint.foreign_file_faults import (
    METADATA,
    distcp_fault,
    end_fault,
    first_fault,
    read_json,
    read_places,
)
from holdfast.checkpoint.manifest import MANIFEST
from holdfast.checkpoint.pickle_outline import Blank, OutlineError, outline_pickle
from holdfast.core.terminal_sanitizer import plain_line
from holdfast.decoding import from_json
from holdfast.linux.limited_child import ChildEndedError, call_in_child
from holdfast.linux.regular_files import open_file

_STATES = "mp_rank_*model_states.pt"
_ZERO = re.compile(r"(\w*zero_pp_rank)_(\d+)_mp_rank_(\d+)_((?:optim|model)_states\.pt)")
_NUMBER = re.compile(r".*?(\d+)")
_MOST_OUTLINE_BYTES = 1 << 30  # of the pickle in a file of torch.save, which holds no tensors
_MOST_MEMORY_BYTES = 8 << 30  # to read one checkpoint: strangers may have written it
_MOST_STEP = 1 << 53
_SIGNS = re.compile(r".*_states\.pt|.*\.distcp|\.metadata|metadata\.json|mp_rank_.*")  # in a checkpoint's folder
_OLD_FILE = "model_optim_rng.pt"  # of each rank, in the format that Megatron had first
ONE_WRITE = "whether all files are of one write"


class TrainerCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A folder with a trainer's checkpoint, as a quick look describes it."""

    step: int | None  # None: neither the folder's name nor its files tell
    url: str
    trainer: str
    files: int
    bytes: int
    ok: bool
    why: str = ""  # not ok


class Verified(NamedTuple):
    """The result of verifying a trainer's checkpoint."""

    fault: str
    checked: str
    unchecked: str


class _Kind(NamedTuple):
    trainer: str
    is_kind: Callable[[Path], bool]
    look: Callable[[Path], str]  # returns what is missing or cut short
    read: Callable[[Path], Verified]


def find_trainer_checkpoints(place: str) -> tuple[TrainerCheckpoint, ...]:
    """Return the trainers' checkpoints in a local folder, newest first. The folder may itself be a checkpoint."""
    folder = Path(place)
    if "://" in place or not folder.is_dir():
        return ()
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = [one for path in (folder, *inside) if _may_be_one(path) and (one := _look_apart(path))]
    return tuple(sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.url), reverse=True))


def verify_trainer_checkpoint(url: str) -> Verified:
    """Read every byte of a trainer's checkpoint that has a checksum, and say what was compared."""
    try:
        told = call_in_child(lambda: msgspec.json.encode([*map(plain_line, _verify(Path(url)))]), _MOST_MEMORY_BYTES)
    except ChildEndedError as e:
        return Verified(f"it cannot be read: whoever read it {e}", "", "")
    return from_json(told, Verified)


def _verify(folder: Path) -> Verified:
    kind = _kind_of(folder)
    return kind.read(folder) if kind else Verified("it is no trainer's checkpoint any more", "", "")


def _may_be_one(folder: Path) -> bool:
    try:
        return any(_SIGNS.fullmatch(name) for name in os.listdir(folder))
    except OSError:
        return True  # which is told


def _look_apart(folder: Path) -> TrainerCheckpoint | None:
    """Return the checkpoint in a folder, if any. A child process reads it: damaged files may crash the reader."""
    try:
        told = call_in_child(lambda: msgspec.json.encode(_look_at(folder)), _MOST_MEMORY_BYTES)
    except ChildEndedError as e:
        found = [_unread_checkpoint(f"whoever read it {e}", _named_step(folder))]
    else:
        found = from_json(told, list[TrainerCheckpoint])
    return msgspec.structs.replace(found[0], url=str(folder)) if found else None


def _unread_checkpoint(why: str, step: int | None = None) -> TrainerCheckpoint:
    return TrainerCheckpoint(step=step, url="", trainer="", files=0, bytes=0, ok=False, why=plain_line(why))


def _kind_of(folder: Path) -> _Kind | None:
    if (folder / MANIFEST).exists():
        return None  # one of ours
    return next((kind for kind in _KINDS if kind.is_kind(folder)), None)


def _look_at(folder: Path) -> list[TrainerCheckpoint]:
    """Return the checkpoint in this folder as a list of one, with an empty `url`; an empty list if there is none."""
    try:
        kind = _kind_of(folder)
        if kind is None:
            return []
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        why, step = plain_line(kind.look(folder)), _step_of(folder, kind)
    except (OSError, RecursionError) as e:  # folders in folders without end
        return [_unread_checkpoint(str(e))]
    size = sum(sizes)
    return [
        TrainerCheckpoint(step=step, url="", trainer=kind.trainer, files=len(sizes), bytes=size, ok=not why, why=why)
    ]


def _step_of(folder: Path, kind: _Kind) -> int | None:
    named = _named_step(folder)
    if named is not None or kind.trainer != _DEEPSPEED:
        return named
    told = [outline.get("global_steps") for outline in _outlines(folder.glob(_STATES))]  # its tag may be any name
    return next((step for step in told if type(step) is int and 0 <= step <= _MOST_STEP), None)


def _named_step(folder: Path) -> int | None:
    named = _NUMBER.fullmatch(folder.name)
    return step if named and (step := int(named[1])) <= _MOST_STEP else None


def _first_end_fault(paths: Iterable[Path]) -> str:
    return next((f"{path.name} {why}" for path in paths if (why := end_fault(path))), "")


# --- DeepSpeed -----------------------------------------------------------------------------------------------------

_DEEPSPEED = "DeepSpeed"


def _is_deepspeed(folder: Path) -> bool:
    return any(folder.glob(_STATES)) or any(_ZERO.fullmatch(path.name) for path in folder.glob("*_states.pt"))


def _outlines(paths: Iterable[Path]) -> Iterator[dict[str, object]]:
    """Yield the plain values in each file of torch.save; skip files that cannot be read."""
    for path in sorted(paths):
        try:
            found = outline_pickle(_read_pickle(path))
        except (OSError, zipfile.BadZipFile, OutlineError, RuntimeError):
            continue
        yield found.state if isinstance(found, Blank) else found if isinstance(found, dict) else {}


def _read_pickle(path: Path) -> bytes:
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        found = [one for one in archive.infolist() if one.filename.endswith("/data.pkl")]
        # torch compresses nothing: a small file that unpacks to gigabytes is none of its
        if not found or found[0].compress_type != zipfile.ZIP_STORED or found[0].file_size > _MOST_OUTLINE_BYTES:
            raise OutlineError("there is no pickle in it, or too large a one")
        return archive.read(found[0])


def _missing_deepspeed(folder: Path) -> tuple[str, bool]:
    """Return two things: a sentence about the first missing file of model or optimizer, or "", and whether the
    checkpoint itself tells how many files there must be."""
    names = {path.name for path in folder.glob("*_states.pt")}
    parts = [found for name in names if (found := _ZERO.fullmatch(name))]
    has_models = any(name.startswith("mp_rank_") for name in names)
    told = next(_outlines(folder.glob(_STATES)), {})
    sizes = [told.get(name) for name in ("dp_world_size", "mp_world_size")]
    replicas, slices = (size if isinstance(size, int) and 0 < size < 1 << 20 else 0 for size in sizes)
    if not has_models and not any(found[4].startswith("model") for found in parts):
        return "mp_rank_00_model_states.pt is missing", False
    most = [max((int(found[place]) for found in parts), default=-1) + 1 for place in (2, 3)]
    kinds = sorted({(found[1], found[4]) for found in parts})
    # One by one, as the first that is missing ends it: the numbers in names and counts may be of any size.
    needed = chain(
        (f"mp_rank_{part:02d}_model_states.pt" for part in range(slices if has_models else 0)),
        (
            f"{kind}_{replica}_mp_rank_{part:02d}_{end}"
            for kind, end in kinds
            for replica in range(max(replicas, most[0]))
            for part in range(max(slices, most[1]))
        ),
    )
    missing = next((f"{name} is missing" for name in needed if name not in names), "")
    return missing, bool(replicas and slices)


def _missing_universal(folder: Path) -> str:
    """Return which parameter's file is missing in a Universal Checkpoint, whose parameters have files of their own."""
    if not (folder / "zero").is_dir():
        return ""
    groups = next(_outlines(folder.glob(f"*{_STATES}")), {}).get("param_shapes")
    found = [group.state for group in groups if isinstance(group, Blank)] if isinstance(groups, list) else []
    files = ["optimizer_state.pt", *(f"{name}/fp32.pt" for group in found for name in group)]
    return next((f"zero/{name} is missing" for name in files if not (folder / "zero" / name).is_file()), "")


def _deepspeed_files(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("*.pt")), *sorted(folder.glob("zero/**/*.pt"))]


def _look_at_deepspeed(folder: Path) -> str:
    missing = _missing_deepspeed(folder)[0] or _missing_universal(folder)
    return _first_end_fault(_deepspeed_files(folder)) or missing


def _read_deepspeed(folder: Path) -> Verified:
    files = _deepspeed_files(folder)
    missing, is_known = _missing_deepspeed(folder)
    missing = missing or _missing_universal(folder)
    unknown = [] if is_known else ["whether parts with higher numbers are missing, as it does not tell how many it has"]
    checked = f"{len(files)} files, the CRC-32 of every record"
    if is_known:
        checked += ", and that all parts are there"
    return Verified(first_fault(files) or missing, checked, "; ".join([*unknown, ONE_WRITE]))


# --- Megatron ------------------------------------------------------------------------------------------------------


def _is_megatron(folder: Path) -> bool:
    sharded = (folder / "metadata.json").is_file() and ((folder / "common.pt").exists() or _is_sharded(folder))
    return sharded or _is_old_megatron(folder)


def _is_old_megatron(folder: Path) -> bool:
    return any(folder.glob(f"mp_rank_*/{_OLD_FILE}"))


def _is_sharded(folder: Path) -> bool:
    try:
        told = read_json(folder / "metadata.json")
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.get("sharded_backend") == "torch_dist"


def _look_at_megatron(folder: Path) -> str:
    if _is_old_megatron(folder):
        paths = sorted(folder.glob("mp_rank_*/*.pt"))
        return _uneven_fault(folder) or _first_end_fault(paths)
    if fault := first_fault([folder / "metadata.json"]):
        return fault
    if not _is_sharded(folder):
        return ""
    return _first_end_fault([folder / "common.pt"]) or _look_at_records(folder)


def _uneven_fault(folder: Path) -> str:
    """Return a sentence about the first folder of a rank that has no file _OLD_FILE; "" if every folder has one."""
    ranks = sorted(path for path in folder.glob("mp_rank_*") if path.is_dir())
    lacking = (path.name for path in ranks if not (path / _OLD_FILE).is_file())
    return next((f"{rank}/{_OLD_FILE} is missing" for rank in lacking), "")


def _read_megatron(folder: Path) -> Verified:
    if _is_old_megatron(folder):
        paths = sorted(folder.glob("mp_rank_*/*.pt"))
        fault = first_fault(paths) or _uneven_fault(folder)
        checked = f"{len(paths)} files, the CRC-32 of every record"
        return Verified(fault, checked, f"whether folders of further ranks are missing; {ONE_WRITE}")
    if not _is_sharded(folder):
        fault = first_fault([folder / "metadata.json"])
        return Verified(fault, "metadata.json alone", "its shards: their format is not torch_dist")
    fault = first_fault([folder / "metadata.json", folder / "common.pt"])
    read = _read_distcp(folder)
    return Verified(fault or read.fault, f"metadata.json, common.pt, {read.checked}", read.unchecked)


# --- torch.distributed.checkpoint ----------------------------------------------------------------------------------


def _is_distcp(folder: Path) -> bool:
    return (folder / METADATA).is_file() or any(folder.glob("*.distcp"))


def _look_at_records(folder: Path) -> str:
    """Return a sentence if `.metadata` cannot be read, or a file named there is missing or too short; else ""."""
    try:
        ends: Counter[str] = Counter()
        for place in read_places(folder):
            ends[place.file] = max(ends[place.file], place.offset + place.length)
    except FileNotFoundError:
        return f"{METADATA} is missing: it is written last"
    except OutlineError as e:
        return f"{METADATA} cannot be read ({e})"
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size < end:
            return f"{name} is cut short"
    return ""


def _read_distcp(folder: Path) -> Verified:
    try:
        places = read_places(folder)
    except (OSError, OutlineError):
        places = []
    files = len({place.file for place in places})
    fault = distcp_fault(folder)
    summed = 0 if fault else sum(_has_checksum(folder, place.file, place.offset) for place in places)
    checked = f"{len(places)} records in {files} files, all that {METADATA} names, the CRC-32 of {summed}"
    bare = f"the bytes of {len(places) - summed} records, which have no checksum; " if summed < len(places) else ""
    return Verified(fault, checked, f"{bare}{METADATA}, which has none; {ONE_WRITE}")


def _has_checksum(folder: Path, name: str, offset: int) -> bool:
    with open_file(folder / name) as file:
        file.seek(offset)
        return file.read(2) == b"PK"


_KINDS = (
    _Kind(_DEEPSPEED, _is_deepspeed, _look_at_deepspeed, _read_deepspeed),
    _Kind("Megatron", _is_megatron, _look_at_megatron, _read_megatron),
    _Kind("torch.distributed.checkpoint", _is_distcp, _look_at_records, _read_distcp),
)
