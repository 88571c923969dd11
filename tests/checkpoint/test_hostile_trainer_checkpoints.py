"""Trainers' checkpoints in a folder that strangers can write to: each costs little and ends in one line."""

import os
import pickle  # noqa: TID251  # of this test's own making
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpoint import trainer_checkpoints
from holdfast.checkpoint.trainer_checkpoints import find_trainer_checkpoints, verify_trainer_checkpoint

MODEL = "mp_rank_00_model_states.pt"
_PROTOCOL = b"\x80\x02"


def zipped(path: Path, content: bytes, way: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", way) as file:
        file.writestr("archive/data.pkl", content)


def write_model(folder: Path, **told: int) -> None:
    zipped(folder / MODEL, pickle.dumps({"dp_world_size": 1, "mp_world_size": 1, **told}))


def numbers_in_names(folder: Path) -> None:
    write_model(folder)
    zipped(folder / f"zero_pp_rank_{10**11}_mp_rank_{10**9}_optim_states.pt", pickle.dumps({}))


def counts(folder: Path) -> None:
    write_model(folder, dp_world_size=(1 << 20) - 1, mp_world_size=(1 << 20) - 1)
    zipped(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", pickle.dumps({}))


def pipe(folder: Path) -> None:
    os.mkfifo(folder / MODEL)


def tuples_in_tuples(folder: Path) -> None:
    """As a key: C has no limit to the depth of its hash."""
    zipped(folder / MODEL, _PROTOCOL + b"}()" + b"\x85" * 400_000 + b"Nu.")


def place_in_a_far_memo(folder: Path) -> None:
    zipped(folder / MODEL, _PROTOCOL + b"Nr" + struct.pack("<I", 0x7FFFFFFF) + b".")


def lists(folder: Path) -> None:
    zipped(folder / MODEL, _PROTOCOL + b"(" + b"]" * (6 << 20) + b"l.")


def packed_lists(folder: Path) -> None:
    zipped(folder / MODEL, _PROTOCOL + b"(" + b"]" * (6 << 20) + b"l.", zipfile.ZIP_DEFLATED)


def deep_json(folder: Path) -> None:
    (folder / "common.pt").touch()
    (folder / "metadata.json").write_text("[" * 200_000)


def huge_json(folder: Path) -> None:
    (folder / "common.pt").touch()
    with (folder / "metadata.json").open("wb") as file:
        file.truncate(1 << 42)  # it takes no room


def link_to_zeros(folder: Path) -> None:
    (folder / "x.distcp").touch()
    (folder / ".metadata").symlink_to("/dev/zero")


def huge_metadata(folder: Path) -> None:
    with (folder / ".metadata").open("wb") as file:
        file.truncate(1 << 42)


class _Storage:  # any class does, as none is ever made
    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)


def _names_records(folder: Path, *places: tuple[str, int, int]) -> None:
    infos = {i: _Storage(relative_path=f, offset=at, length=n) for i, (f, at, n) in enumerate(places)}
    (folder / ".metadata").write_bytes(pickle.dumps(_Storage(storage_data=infos)))


def huge_record(folder: Path) -> None:
    (folder / "x").write_bytes(b"PK" + bytes(100))
    _names_records(folder, ("x", 0, 1 << 60))


def pipe_for_records(folder: Path) -> None:
    os.mkfifo(folder / "x")
    _names_records(folder, ("x", 0, 0))


HOSTILE: tuple[Callable[[Path], None], ...] = (
    *(numbers_in_names, counts, pipe, tuples_in_tuples, place_in_a_far_memo, lists, packed_lists, deep_json),
    *(huge_json, link_to_zeros, huge_metadata, huge_record, pipe_for_records),
)
HARMLESS = (packed_lists, lists, place_in_a_far_memo)  # what they hold is not known then, and it is not needed


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_checkpoints, "_MOST_MEMORY_BYTES", 256 << 20)


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.parametrize("write", HOSTILE)
def test_a_hostile_checkpoint_is_listed_and_read(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "hostile-7").mkdir()
    write(tmp_path / "hostile-7")
    (tmp_path / "sound-3").mkdir()
    write_model(tmp_path / "sound-3")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {Path(one.url).name: one for one in find_trainer_checkpoints(str(tmp_path))}
    assert found["sound-3"].ok and found["sound-3"].step == 3
    hostile = found["hostile-7"]
    assert hostile.step in (7, None)
    verified = verify_trainer_checkpoint(hostile.url)
    assert write in HARMLESS or not (hostile.ok and not verified.fault)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (200 << 10), "whatever it took, a child took"


@pytest.mark.parametrize("step", [-1, True, 1.5, 10**6000, "7"], ids=range(5))
def test_a_step_that_is_none(step: object, tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    zipped(tmp_path / "best" / MODEL, pickle.dumps({"global_steps": step}))
    (tmp_path / f"step-{10**40}").mkdir()
    write_model(tmp_path / f"step-{10**40}")
    assert [one.step for one in find_trainer_checkpoints(str(tmp_path))] == [None, None]


def test_reasons_are_single_lines_of_text(tmp_path: Path) -> None:
    """File names of strangers stand in them."""
    name = os.fsdecode(b"x\xff\x1b[2J\nholdfast: all is well")
    _names_records(tmp_path, (name, 0, 1))
    [one] = find_trainer_checkpoints(str(tmp_path))
    assert one.why == "x\ufffd holdfast: all is well is missing"
    assert verify_trainer_checkpoint(one.url).fault == one.why
    msgspec.json.encode(one)
