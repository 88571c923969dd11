"""A folder of checkpoints that others may write to: what they put there is neither waited for nor followed."""

import errno
import os
import re
from pathlib import Path

import pytest

from holdfast.checkpoint.local_storage import LocalStorage
from holdfast.checkpoint.manifest import MANIFEST, METADATA
from holdfast.checkpoint.remote_storage import RemoteStorage
from holdfast.checkpoint.retention import clean_unpublished
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.stored_checkpoints import find_checkpoints

STEP = "step-00000007"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "ckpt" / STEP).mkdir(parents=True)
    return tmp_path / "ckpt"


def make_huge(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)  # it takes no room


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(base: Path) -> None:
    os.mkfifo(base / STEP / MANIFEST)
    [found] = find_checkpoints(str(base))
    assert not found.ok and MANIFEST in found.why
    with pytest.raises(StorageError, match=re.escape(f"{base}/{STEP}/{MANIFEST} ")) as refused:
        LocalStorage(str(base)).open(f"{STEP}/{MANIFEST}")
    assert isinstance(refused.value.__context__, OSError) and refused.value.__context__.errno == errno.EINVAL
    (base / STEP / MANIFEST).unlink()
    assert find_checkpoints(str(base)) == ()


@pytest.mark.parametrize("kind", [LocalStorage, RemoteStorage])
def test_a_manifest_of_gigabytes_is_not_read(base: Path, kind: type[LocalStorage] | type[RemoteStorage]) -> None:
    make_huge(base / STEP / MANIFEST, 1 << 40)
    make_huge(base / STEP / METADATA, 1 << 40)
    storage = kind(str(base) if kind is LocalStorage else f"file://{base}")
    for name in (MANIFEST, METADATA):
        with pytest.raises(StorageError, match="has 1,099,511,627,776 bytes"):
            storage.read(f"{STEP}/{name}")
    [found] = find_checkpoints(str(base))
    assert not found.ok and "bytes" in found.why


def test_nothing_is_written_through_a_link(base: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    for name in (".holdfast-author.json.new", ".holdfast-author.json"):
        (base / name).symlink_to(mine)
    LocalStorage(str(base)).put_file(".holdfast-author.json", b"{}")
    assert mine.read_text() == "precious" and (base / ".holdfast-author.json").read_bytes() == b"{}"
    assert not (base / ".holdfast-author.json").is_symlink()


def test_a_link_in_place_of_a_folder_is_neither_written_to_nor_emptied(base: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("precious")
    storage = LocalStorage(str(base))
    (base / ".step-00000009.tmp-x").symlink_to(home)
    with pytest.raises(StorageError, match="it is a link"):
        storage.make_folder(".step-00000009.tmp-x")
    (base / ".step-00000008.gone-x").symlink_to(home)
    (base / "step-00000006").symlink_to(home)
    clean_unpublished(str(base), None, force=True)
    storage.remove_folder("step-00000006")
    assert (home / "thesis").read_text() == "precious"
    assert [name for name in os.listdir(base) if name != STEP] == []


def test_a_folder_that_another_makes_meanwhile_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, late = os.mkdir, [tmp_path / "shared"]

    def mkdir(path: str, *args: int) -> None:
        try:
            real(path, *args)
        except FileNotFoundError:
            while late:  # another node of this host makes it right now
                real(late.pop())
            raise

    monkeypatch.setattr(os, "mkdir", mkdir)
    LocalStorage(str(tmp_path / "shared" / "n0")).make_folder()
    assert (tmp_path / "shared" / "n0").is_dir()
    with pytest.raises(StorageError, match="/proc/nowhere/n0 "):
        LocalStorage("/proc/nowhere/n0").make_folder()
