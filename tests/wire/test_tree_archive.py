"""Trees as archives: the same content has the same digest, and no archive writes outside of its tree."""

import io
import os
import re
import tarfile
from pathlib import Path

import pytest

from holdfast.wire.releases import tree_archive
from holdfast.wire.releases.tree_archive import ArchiveError, ArchiveLimits, UnsafeArchiveError

FILES = {"train.py": "print(1)\n", "lib/model.py": "A = 1\n", "lib/deep/er.py": "", "data/ümläut.txt": "ä\n"}


def plant(root: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def packed(root: Path, paths: list[str], to: Path) -> str:
    return tree_archive.pack_files(root, paths, to, ArchiveLimits()).digest


def test_the_same_content_has_the_same_digest(tmp_path: Path) -> None:
    first, second = plant(tmp_path / "a"), plant(tmp_path / "b")
    os.utime(second / "train.py", (1, 1))
    (second / "lib/model.py").chmod(0o600)
    digest = packed(first, [*FILES], tmp_path / "out")
    archive = (tmp_path / "out" / f"{digest}.tar").read_bytes()
    assert packed(second, [*reversed(FILES)], tmp_path / "out") == digest
    assert (tmp_path / "out" / f"{digest}.tar").read_bytes() == archive, "the very same bytes"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{digest}.tar"], "no drafts are left"


@pytest.mark.parametrize("change", ["content", "name", "executable", "link", "moved content"])
def test_another_content_has_another_digest(tmp_path: Path, change: str) -> None:
    root = plant(tmp_path / "a")
    paths = [*FILES]
    before = packed(root, paths, tmp_path / "out")
    match change:
        case "content":
            (root / "train.py").write_text("print(2)\n")
        case "name":
            (root / "train.py").rename(root / "tr.py")
            paths = ["tr.py", *paths[1:]]
        case "executable":
            (root / "train.py").chmod(0o755)
        case "link":
            (root / "train.py").unlink()
            (root / "train.py").symlink_to("lib/model.py")
        case "moved content":  # from the end of one file to the beginning of the next
            (root / "lib/model.py").write_text("A = 1\nprint(1)\n")
            (root / "train.py").write_text("")
    assert packed(root, paths, tmp_path / "out") != before


def test_what_was_packed_is_unpacked(tmp_path: Path) -> None:
    root = plant(tmp_path / "a")
    (root / "train.py").chmod(0o755)
    (root / "lib" / "link.py").symlink_to("deep/../../train.py")
    digest = packed(root, [*FILES, "lib/link.py", "gone.py"], tmp_path / "out")
    archive = tmp_path / "out" / f"{digest}.tar"
    tree_archive.unpack_archive(archive, tmp_path / "to", digest)
    for name, text in FILES.items():
        assert (tmp_path / "to" / name).read_text() == text
    assert os.access(tmp_path / "to" / "train.py", os.X_OK)
    assert not os.access(tmp_path / "to" / "lib/model.py", os.X_OK)
    assert os.readlink(tmp_path / "to" / "lib/link.py") == "deep/../../train.py"
    assert packed(tmp_path / "to", [*FILES, "lib/link.py"], tmp_path / "out") == digest
    assert set(tree_archive.archive_contents(archive)) == {*FILES, "lib/link.py"}


def test_bounds_name_the_biggest(tmp_path: Path) -> None:
    root = plant(tmp_path / "a")
    (root / "data" / "huge.bin").write_bytes(bytes(3 << 20))
    paths = [*FILES, "data/huge.bin"]
    with pytest.raises(ArchiveError, match=r"3 MiB in 5 files.*\b2 MiB\b.*data/huge\.bin \(3 MiB\)"):
        tree_archive.pack_files(root, paths, tmp_path / "out", ArchiveLimits(bytes=2 << 20))
    with pytest.raises(ArchiveError, match=r"\b5 files.*\b4\b.*(data|lib) \(2\)"):
        tree_archive.pack_files(root, paths, tmp_path / "out", ArchiveLimits(files=4))
    assert not (tmp_path / "out").exists()


def test_a_damaged_archive_is_known(tmp_path: Path) -> None:
    root = plant(tmp_path / "a", {"a.py": "x" * 5000})
    digest = packed(root, ["a.py"], tmp_path / "out")
    archive = tmp_path / "out" / f"{digest}.tar"
    whole = bytearray(archive.read_bytes())
    whole[2000] ^= 1
    archive.write_bytes(whole)
    with pytest.raises(ArchiveError, match=re.escape(archive.name)):
        tree_archive.unpack_archive(archive, tmp_path / "b", digest)
    archive.write_bytes(whole[:3000])
    with pytest.raises(ArchiveError, match=r"\.tar|a\.py"):
        tree_archive.unpack_archive(archive, tmp_path / "c", digest)


def evil(*members: tuple[str, bytes, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member, io.BytesIO())
    return made.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("/abs", tarfile.REGTYPE, "")],
        [("../up", tarfile.REGTYPE, "")],
        [("a/../../up", tarfile.REGTYPE, "")],
        [("a", tarfile.SYMTYPE, "/etc/passwd")],
        [("a", tarfile.SYMTYPE, "../..")],
        [("a/b", tarfile.SYMTYPE, "../../x")],
        [("a", tarfile.SYMTYPE, "b"), ("a/c", tarfile.REGTYPE, "")],
        [("a", tarfile.LNKTYPE, "/etc/passwd")],
        [("a", tarfile.FIFOTYPE, "")],
        [("a", tarfile.CHRTYPE, "")],
        [("a", tarfile.DIRTYPE, "")],
    ],
)
def test_no_archive_writes_elsewhere(tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    archive = tmp_path / "evil.tar"
    archive.write_bytes(evil(*members))
    with pytest.raises(UnsafeArchiveError):
        tree_archive.unpack_archive(archive, tmp_path / "to", "0" * 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.tar", "to"]
