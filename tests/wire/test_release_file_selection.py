"""Which files belong to a release."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.wire.releases.release_file_selection import ReleaseFilesError, find_repository, list_release_files
from tests.wire.test_tree_archive import plant

CODE = {"train.py": "", "lib/model.py": "", "notes.txt": ""}
REST = {"lib/__pycache__/model.pyc": "", "out/log.txt": "", "weights.bin": ""}


def git(root: Path, *words: str) -> None:
    name = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    subprocess.run(["git", "-C", str(root), *name, *words], check=True, capture_output=True)


def repo(root: Path) -> Path:
    plant(root, {**CODE, **REST, ".gitignore": "out/\n*.bin\n__pycache__\n"})
    git(root, "init", "-q", ".")
    git(root, "add", "train.py", ".gitignore")
    git(root, "commit", "-qm", "first")
    return root


def test_git_knows_what_is_ignored(tmp_path: Path) -> None:
    root = repo(tmp_path / "a")
    found = list_release_files(root)
    assert found.kept == (".gitignore", "lib/model.py", "notes.txt", "train.py"), (
        "files that nobody has added count too"
    )
    assert found.left_out == (".git", "lib/__pycache__", "out", "weights.bin")
    assert found.tracked == {".gitignore", "train.py"}
    assert found.possible_outputs() == {"notes.txt"}, "which a script may have written as well"
    assert find_repository(root / "lib") == root


def test_deleted_files_and_links(tmp_path: Path) -> None:
    root = repo(tmp_path / "a")
    (root / "train.py").unlink()
    (root / "inside").symlink_to("lib/model.py")
    (root / "lib" / "up").symlink_to("../notes.txt")
    (root / "out_link").symlink_to(tmp_path)
    (root / "far").symlink_to("../../far")
    found = list_release_files(root)
    assert "train.py" not in found.kept
    assert {"inside", "lib/up"} < set(found.kept)
    assert {"out_link", "far"} < set(found.left_out), "what lies elsewhere is no part of the tree"


def test_repositories_within_a_repository(tmp_path: Path) -> None:
    root = repo(tmp_path / "a")
    repo(root / "vendor")
    found = list_release_files(root)
    assert "vendor/train.py" in found.kept
    assert {"vendor/out", "vendor/.git"} < set(found.left_out)


def test_a_plain_folder(tmp_path: Path) -> None:
    root = plant(tmp_path / "a", {**CODE, **REST, "env/pyvenv.cfg": "", "env/lib/x.py": "", ".venv/y.py": ""})
    with (root / "big.npy").open("wb") as file:
        os.truncate(file.fileno(), 17 << 20)
    os.mkfifo(root / "pipe")
    (root / "far").symlink_to("/etc")
    plant(root, {"run/journal.db": "", "run/releases/x": ""})
    found = list_release_files(root, apart=(root / "run",))
    assert found.kept == ("lib/model.py", "notes.txt", "out/log.txt", "train.py")
    assert found.left_out == (".venv", "big.npy", "env", "far", "lib/__pycache__", "weights.bin")
    assert find_repository(root) is None


def test_a_folder_that_git_ignores_as_a_whole(tmp_path: Path) -> None:
    root = repo(tmp_path / "a")
    plant(root / "out" / "exp", {"job.py": ""})
    found = list_release_files(root / "out" / "exp")
    assert found.kept == ("job.py",) and not found.git


def test_a_folder_that_goes_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, {"train.py": "", "run/partial/a.py": ""})
    walk = os.walk

    def walks(root: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walk(root, onerror=onerror):
            yield found
            if found[0].endswith("run"):
                shutil.rmtree(tmp_path / "run" / "partial")

    monkeypatch.setattr(os, "walk", walks)
    assert list_release_files(tmp_path).kept == ("train.py",)
    with pytest.raises(ReleaseFilesError, match="gone"):
        list_release_files(tmp_path / "gone")


def test_too_many_files(tmp_path: Path) -> None:
    root = plant(tmp_path / "a", {f"{n}.txt": "" for n in range(9)})
    with pytest.raises(ReleaseFilesError, match=r"\b8 files"):
        list_release_files(root, most=8)


def test_variables_of_git_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, other = repo(tmp_path / "a"), repo(tmp_path / "b")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert find_repository(root) == root


def test_without_git_a_work_tree_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = repo(tmp_path / "a")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = list_release_files(root)
    assert "train.py" in found.kept and ".git" in found.left_out and not found.git


@pytest.mark.parametrize("made", [repo, lambda root: plant(root, CODE)], ids=["git", "folder"])
def test_checkpoints_and_names_that_are_no_text_are_no_code(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    root = made(tmp_path / "proj")
    plant(root, {"ckpt/step-1/holdfast.json": "", "ckpt/step-1/layout.json": "", "ckpt/note.txt": ""})
    plant(root, {"ckpt/.holdfast-author.json": "{}", "ckpt/.holdfast-doubts.json": "[]"})
    Path(os.fsdecode(os.fsencode(root) + b"/bad\xff.py")).touch()
    found = list_release_files(root)
    assert {*found.kept} >= {"train.py", "ckpt/note.txt"}
    assert not [path for path in found.kept if "step-1" in path or "bad" in path or ".holdfast" in path]
    assert {"ckpt/step-1/holdfast.json", "ckpt/step-1/layout.json", "bad?.py"} <= {*found.left_out}
