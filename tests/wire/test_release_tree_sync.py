"""The copy of a release beside the user's tree."""

import errno
import os
from pathlib import Path

import pytest

from holdfast.wire.releases import release_tree_sync, tree_archive
from holdfast.wire.releases.release_file_selection import list_release_files
from holdfast.wire.releases.release_tree_sync import GatheredFiles, TreeIndex
from holdfast.wire.releases.tree_archive import ArchiveLimits
from tests.wire.test_tree_archive import plant

CODE = {"train.py": "print(1)\n", "lib/model.py": "", "conf.yaml": "lr: 1"}
LONG_AGO = 10**9


def copied(folder: Path, root: Path) -> tuple[Path, TreeIndex]:
    """A copy of this tree, as ranks run from it."""
    packed = tree_archive.pack_files(root, list_release_files(root).kept, folder / "releases", ArchiveLimits())
    archive, at = folder / "releases" / f"{packed.digest}.tar", folder / "releases" / packed.digest[:16]
    files = tree_archive.unpack_archive(archive, at, packed.digest)
    index = release_tree_sync.make_index(files, at, str(root), str(root))
    release_tree_sync.prepare_tree(at, index)
    release_tree_sync.write_index(at, index)
    return at, index


def test_only_what_was_touched_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = plant(tmp_path / "proj", CODE)
    (root / "link.py").symlink_to("train.py")
    _, index = copied(tmp_path, root)
    read: list[str] = []
    word = release_tree_sync._file_digest

    def noted(path: str) -> str:
        read.append(os.path.relpath(path, root))
        return word(path)

    monkeypatch.setattr(release_tree_sync, "_file_digest", noted)
    differ, index = release_tree_sync.find_edits(index)
    assert differ == [] and len(read) == 4
    assert index.equal == {}, "a file that has just been touched may be touched again at the same time of its clock"
    monkeypatch.setattr(release_tree_sync, "_RACY_NS", -LONG_AGO)
    _, index = release_tree_sync.find_edits(index)
    read.clear()
    assert release_tree_sync.find_edits(index)[0] == [] and read == [], "as git does it"
    os.utime(root / "train.py")
    assert release_tree_sync.find_edits(index)[0] == [] and read == ["train.py"], "touched, and equal"
    stamp = os.stat(root / "conf.yaml")
    (root / "conf.yaml").write_text("lr: 2")
    os.utime(root / "conf.yaml", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert release_tree_sync.find_edits(index)[0] == ["conf.yaml"], "of the same size and time"


@pytest.mark.parametrize("edit", ["content", "mode", "gone", "link"])
def test_edits(tmp_path: Path, edit: str) -> None:
    root = plant(tmp_path / "proj", CODE)
    _, index = copied(tmp_path, root)
    path = root / "lib" / "model.py"
    match edit:
        case "content":
            path.write_text("x")
        case "mode":
            path.chmod(0o755)
        case "gone":
            path.unlink()
        case "link":
            path.rename(root / "other")
            path.symlink_to(root / "other")
    assert release_tree_sync.find_edits(index)[0] == ["lib/model.py"]


def test_what_was_made_in_the_copy_is_moved(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {**CODE, "latest": "1", "data/x": ""})
    at, index = copied(tmp_path, root)
    assert (at / "latest").is_symlink() and not (at / "lib").is_symlink()
    plant(at, {"checkpoints/1/state": "s", "lib/cache.txt": "c", "lib/__pycache__/model.pyc": ""})
    (at / "last").symlink_to("checkpoints/1")
    (at / "new").write_text("2")
    os.replace(at / "new", at / "latest")  # in the place of our link
    writing = (at / "lib" / "log").open("w")
    _, gathered = release_tree_sync.gather_files(at)
    assert gathered.moved == ("checkpoints", "last", "latest", "lib/cache.txt", "lib/log")
    assert gathered.stuck == ()
    assert (root / "checkpoints" / "1" / "state").read_text() == "s"
    assert (root / "last" / "state").exists() and os.readlink(root / "last") == "checkpoints/1"
    assert (root / "latest").read_text() == "2" and not (root / "latest").is_symlink(), "the newer one"
    assert not (root / "lib" / "__pycache__").exists()
    with writing:
        writing.write("who still writes goes on")
    assert (root / "lib" / "log").read_text() == (at / "lib" / "log").read_text() == "who still writes goes on"
    assert (at / "checkpoints" / "1" / "state").read_text() == "s", "and it is found from the copy"
    assert release_tree_sync.gather_files(at) == (index, GatheredFiles())
    assert [*release_tree_sync.gather_all(tmp_path / "releases")] == []


def test_nothing_is_overwritten_that_is_newer(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", CODE)
    at, _ = copied(tmp_path, root)
    plant(at, {"notes": "of a rank", "both/a": "of a rank"})
    os.utime(at / "notes", (LONG_AGO, LONG_AGO))
    plant(root, {"notes": "of the user", "both/b": ""})
    release_tree_sync.gather_files(at)
    assert (root / "notes").read_text() == "of the user"
    assert (root / f"notes.of-{at.name}").read_text() == "of a rank"
    assert (root / "both" / "a").read_text() == "of a rank" and (root / "both" / "b").exists()


def test_to_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = plant(tmp_path / "proj", CODE)
    at, _ = copied(tmp_path, root)
    plant(at, {"checkpoints/1/state": "s", "loose": "l"})

    def rename(source: Path, to: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "rename", rename)
    _, gathered = release_tree_sync.gather_files(at)
    assert gathered.moved == ("checkpoints/1/state", "loose")
    assert (root / "checkpoints" / "1" / "state").read_text() == "s" and (root / "loose").read_text() == "l"
    assert (at / "loose").is_symlink() and (at / "checkpoints" / "1" / "state").read_text() == "s"
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_moved_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = plant(tmp_path / "proj", CODE)
    at, index = copied(tmp_path, root)
    (at / "made").write_text("x")

    def rename(source: Path, to: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", rename)
    [(_, gathered)] = release_tree_sync.gather_all(tmp_path / "releases")
    told = release_tree_sync.describe_gathered(index, gathered)
    assert told.startswith("made ") and told.endswith(f"{at}: {os.strerror(errno.ENOSPC)}")
    assert (at / "made").read_text() == "x"


def test_links_follow_the_tree(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {**CODE, "data/x": ""})
    plant(root, {"out/1": ""})
    at, index = copied(root, root)  # the run is in the tree itself
    assert not (at / "releases").exists(), "and is not linked into its own copy"
    (root / "out" / "1").unlink()
    os.rename(root / "out", root / "results")
    release_tree_sync.link_user_files(at, index)
    assert (at / "results").is_symlink()


def test_links_of_ours_are_never_moved(tmp_path: Path) -> None:
    """What they led to may have been removed since, as old checkpoints are."""
    root = plant(tmp_path / "proj", {**CODE, "ckpt/step-1.txt": "old"})
    at, _ = copied(tmp_path, root)
    (at / "new").mkdir()
    (at / "new" / "step-2").mkdir()
    assert release_tree_sync.gather_files(at)[1].moved == ("new",)
    assert (at / "new").is_symlink() and (root / "new" / "step-2").is_dir()
    (root / "new" / "step-2").rmdir()
    (root / "new").rmdir()
    assert release_tree_sync.gather_files(at)[1] == GatheredFiles()
    assert not os.path.lexists(root / "new")


def test_what_is_told_is_where_it_lies(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", CODE)
    at, index = copied(tmp_path, root)
    (at / "ckpt.pt").write_text("ours")
    os.utime(at / "ckpt.pt", (1, 1))
    (root / "ckpt.pt").write_text("made by another run since")
    name = f"ckpt.pt.of-{at.name}"
    gathered = release_tree_sync.gather_files(at)[1]
    assert gathered.moved == (name,) and (root / name).read_text() == "ours"
    assert release_tree_sync.describe_gathered(index, gathered).endswith(name)


def test_both_are_kept_and_told(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", CODE)
    at, index = copied(tmp_path, root)
    (at / "lib" / "notes").write_text("of a rank")
    os.utime(at / "lib" / "notes", (LONG_AGO, LONG_AGO))
    (root / "elsewhere").write_text("of the user")
    (root / "lib" / "notes").symlink_to(root / "elsewhere")
    os.utime(root / "lib" / "notes", (1, 1), follow_symlinks=False)  # the link is old, and what it leads to is not
    gathered = release_tree_sync.gather_files(at)[1]
    assert gathered.both == (f"lib/notes.of-{at.name}",) and (root / "lib" / "notes").read_text() == "of the user"
    assert (root / gathered.both[0]).read_text() == "of a rank"
    said = release_tree_sync.describe_gathered(index, gathered)
    assert "; lib/notes " in said and said.endswith(f" notes.of-{at.name}")


def test_a_link_that_a_script_turns_to_another_folder(tmp_path: Path) -> None:
    root = plant(tmp_path / "proj", {**CODE, "out/1/x": "", "out/2/x": ""})
    (root / "latest").symlink_to("out/1")
    at, _ = copied(tmp_path, root)
    (at / "new").symlink_to("out/2")
    os.replace(at / "new", at / "latest")
    assert release_tree_sync.gather_files(at)[1] == GatheredFiles(moved=("latest",))
    assert os.readlink(root / "latest") == "out/2"
