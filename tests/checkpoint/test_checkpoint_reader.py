"""Reading back: any pieces to any place, nothing that has changed is believed, and plain torch reads it too."""

import dataclasses
import errno
import os
import pickle  # noqa: TID251  # torch's metadata is one, and this test's own
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.checkpoint_publication import publish_checkpoint, staging_folder, write_part
from holdfast.checkpoint.checkpoint_reader import (
    read_manifest,
    read_metadata,
    read_part,
    read_ranges,
    verify_checkpoint,
)
from holdfast.checkpoint.manifest import BLOCK_BYTES, MANIFEST, Author
from holdfast.checkpoint.storage_errors import CorruptError, StorageError
from holdfast.checkpoint.verified_block_reads import PartPiece
from tests.checkpoint.making import content, in_pages, save

SIZES = (BLOCK_BYTES + 4096 + 17, 5000, 2 * BLOCK_BYTES)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Not to be changed."""
    return save(tmp_path_factory.mktemp("base"), 3, sizes=SIZES)


@st.composite
def pieces(draw: st.DrawFn) -> list[PartPiece]:
    """Any pieces of any parts, one behind the other in memory, with gaps."""
    found, to = [], 0
    for _ in range(draw(st.integers(1, 5))):
        rank = draw(st.integers(0, len(SIZES) - 1))
        start = draw(st.integers(0, SIZES[rank]))
        size = draw(st.integers(0, SIZES[rank] - start))
        to += draw(st.sampled_from([0, 1, 4095]))
        found.append(PartPiece(rank=rank, start=start, bytes=size, to=to))
        to += size
    return found


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=pieces())
def test_any_pieces_come_to_their_places(url: str, wanted: list[PartPiece]) -> None:
    size = max(piece.to + piece.bytes for piece in wanted) + 10
    memory, moved = in_pages(bytes(size)), list[int]()
    read_ranges(url, wanted, memory, moved=moved.append)
    expected = bytearray(size)
    for piece in wanted:
        part = content(SIZES[piece.rank], 3000 + piece.rank)
        expected[piece.to : piece.to + piece.bytes] = part[piece.start : piece.start + piece.bytes]
    assert memory == expected
    assert sum(moved) == sum(piece.bytes for piece in wanted)


def test_pieces_that_are_not_there_or_have_no_room(url: str) -> None:
    memory = memoryview(bytearray(100))
    with pytest.raises(StorageError, match=r"__1_0\.distcp.* 4990 .* 5010"):
        read_ranges(url, [PartPiece(rank=1, start=4990, bytes=20, to=0)], memory)
    with pytest.raises(StorageError, match=r"step 3.*__7_0\.json"):
        read_part(url, 7, memory)
    with pytest.raises(ValueError, match=str(len(memory))):
        read_part(url, 1, memory)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    [said] = verify_checkpoint(str(tmp_path))
    assert said.startswith(f"{tmp_path} ") and MANIFEST in said


def test_a_changed_block_is_named_and_not_believed(tmp_path: Path) -> None:
    url = Path(save(tmp_path, 3, sizes=SIZES))
    with (url / "__2_0.distcp").open("r+b") as file:
        file.seek(BLOCK_BYTES + 1234)
        byte = file.read(1)[0]
        file.seek(BLOCK_BYTES + 1234)
        file.write(bytes([byte ^ 1]))
    said = f"__2_0.distcp: block 1 of 2 (bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}) "
    [fault] = verify_checkpoint(str(url))
    assert fault.startswith(said)
    memory = in_pages(bytes(2 * BLOCK_BYTES))
    with pytest.raises(CorruptError, match=re.escape(said)):
        read_part(str(url), 2, memory)
    read_ranges(str(url), [PartPiece(rank=2, start=0, bytes=BLOCK_BYTES, to=0)], memory)  # the other block is sound


def test_a_disk_that_cannot_read_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    [fault] = [said for said in verify_checkpoint(url) if said.startswith("__1_0.distcp: block 0 of 1 ")]
    assert fault.endswith(os.strerror(errno.EIO))


def test_a_file_that_shrinks_while_it_is_read_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    [fault] = [said for said in verify_checkpoint(url) if said.startswith("__1_0.distcp: block 0 of 1 ")]
    assert " 0 bytes" in fault


class Vandal:
    """Does one thing to a checkpoint that it must not survive unnoticed, and can take it back."""

    def __init__(self, url: Path, other: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.url, self.other = url, other
        self.before = {path: path.read_bytes() for path in url.iterdir()}
        self.files = sorted(self.before)

    def any_file(self) -> Path:
        return self.random.choice([path for path in self.files if self.before[path]])

    def flip(self) -> str:
        path = self.any_file()
        at = self.random.randrange(len(self.before[path]))
        bit = 1 << self.random.randrange(8)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([self.before[path][at] ^ bit]))
        return f"bit {bit} of byte {at} of {path.name}"

    def truncate(self) -> str:
        path = self.any_file()
        size = self.random.randrange(len(self.before[path]))
        os.truncate(path, size)
        return f"{path.name} cut to {size}"

    def lose(self) -> str:
        path = self.any_file()
        path.unlink()
        return f"{path.name} lost"

    def swap(self) -> str:
        first, second = self.random.sample(self.files, 2)
        first.write_bytes(self.before[second])
        second.write_bytes(self.before[first])
        return f"{first.name} and {second.name} swapped"

    def replace(self) -> str:
        """The same file of another step."""
        path = self.any_file()
        path.write_bytes((self.other / path.name).read_bytes())
        return f"{path.name} of another step"

    def tamper(self) -> str:
        """A manifest that still reads well."""
        path = self.url / self.random.choice(["holdfast.json", "__0_0.json"])
        old = self.before[path]
        at = self.random.choice([found.start() for found in re.finditer(rb"\d", old)])
        new = b"%d" % ((old[at] - 48 + self.random.randrange(1, 10)) % 10)
        path.write_bytes(old[:at] + new + old[at + 1 :])
        return f"digit {at} of {path.name}"

    def undo(self) -> None:
        for path, was in self.before.items():
            if not path.exists() or path.read_bytes() != was:
                path.write_bytes(was)


@pytest.mark.parametrize("many", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_all_of_so_many_corruptions_are_caught(tmp_path: Path, many: int) -> None:
    sizes = (BLOCK_BYTES + 12345, 5000, 70000)
    url, other = Path(save(tmp_path, 3, sizes=sizes)), Path(save(tmp_path, 4, sizes=sizes))
    # Torch's metadata is the same at every step, so that of another step does no harm.
    (other / ".metadata").write_bytes(b"another one")
    vandal = Vandal(url, other, seed=20)
    deeds: list[Callable[[], str]] = [vandal.truncate, vandal.lose, vandal.swap, vandal.replace, vandal.tamper]
    caught, missed = 0, []
    for number in range(many):
        deed = vandal.flip if number % 2 else deeds[number // 2 % len(deeds)]
        what = deed()
        said = verify_checkpoint(str(url))
        named = any(path.name in sentence for sentence in said for path in vandal.files)
        caught += bool(said) and named
        missed += [] if said and named else [(what, said)]
        vandal.undo()
    assert missed == []
    assert caught == many
    assert verify_checkpoint(str(url)) == ()


def test_a_folder_under_the_name_of_another_step(tmp_path: Path) -> None:
    url = Path(save(tmp_path, 3))
    url.rename(tmp_path / "step-00000004")
    [said] = verify_checkpoint(str(tmp_path / "step-00000004"))
    assert re.fullmatch(rf"{MANIFEST} .*step 3\b.*step 4", said)


def test_a_format_of_another_time(tmp_path: Path) -> None:
    url = Path(save(tmp_path, 3))
    manifest = url / "holdfast.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format":1', b'"format":2'))
    [said] = verify_checkpoint(str(url))
    assert re.fullmatch(rf"{MANIFEST} .*format 2\b.*format 1", said)


def saved_by_torch(folder: Path) -> tuple[dict[str, Any], list[bytes], bytes]:
    """A state, and what torch makes of it: the files of two ranks, and its metadata."""
    import torch
    import torch.distributed.checkpoint as dcp

    held = {"weight": torch.rand(300, 500), "moment": torch.rand(2_500_000), "step": 7, "words": {"a": [1, "b"]}}
    dcp.save(held, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)
    # Two threads of one rank write two files; called as a second rank's, they are a checkpoint of two.
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, item in metadata.storage_data.items():
        named = item.relative_path.replace("__0_1", "__1_0")
        metadata.storage_data[index] = dataclasses.replace(item, relative_path=named)
    assert {item.relative_path for item in metadata.storage_data.values()} == {"__0_0.distcp", "__1_0.distcp"}
    files = [(folder / f"__0_{number}.distcp").read_bytes() for number in range(2)]
    return held, files, pickle.dumps(metadata)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_plain_torch_loads_what_is_published(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    held, files, metadata = saved_by_torch(tmp_path / "torch")
    author, parts = Author(1), []
    for rank, whole in enumerate(files):
        memory = in_pages(whole)
        cut = len(whole) // 3  # as of a share that lies in several ranges of an image
        parts.append(write_part(staging_folder(str(tmp_path), 9, author), rank, [memory[:cut], memory[cut:]]))
    url = publish_checkpoint(str(tmp_path), 9, parts, metadata, author=author, torch=torch.__version__)
    loaded: dict[str, Any] = {
        "weight": torch.zeros(300, 500),
        "moment": torch.zeros(2_500_000),
        "step": 0,
        "words": {"a": [0, ""]},
    }
    dcp.load(loaded, checkpoint_id=url, no_dist=True)
    assert torch.equal(loaded["weight"], held["weight"]) and torch.equal(loaded["moment"], held["moment"])
    assert (loaded["step"], loaded["words"]) == (7, {"a": [1, "b"]})
    assert read_manifest(url).torch == str(torch.__version__)
    assert read_metadata(url) == metadata
    for rank, whole in enumerate(files):
        back = in_pages(bytes(len(whole)))
        read_part(url, rank, back)
        assert bytes(back) == whole
