"""Archives of releases, whatever they hold: unpacked into their own folder, or refused in one sentence."""

import io
import os
import shutil
import tarfile
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.wire.releases import tree_archive
from holdfast.wire.releases.tree_archive import ArchiveError, ArchiveLimits
from tests.fuzz.making import hostile, mutated, narrow

_NAMES = st.sampled_from(
    (
        "a",
        "b",
        "a/b",
        "a/b/c",
        "../out",
        "/tmp/out",
        "a/../../out",
        ".",
        "",
        "a//b",
        "a/",
        "x" * 300,
        "ü",
        "a\nb",
        "d/l",
    )
)
_PLAIN_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.SYMTYPE)
_ODD_TYPES = (tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"S", b"Z")
_TYPES = st.sampled_from((*_PLAIN_TYPES, *_ODD_TYPES))
_SIZES = st.sampled_from((-1, 0, 1, 3, 512, 1 << 20, 1 << 33, 1 << 62))
_MEMBERS = st.lists(st.tuples(_NAMES, _TYPES, _NAMES, _SIZES), min_size=1, max_size=5)


def _archive(members: list[tuple[str, bytes, str, int]]) -> bytes:
    """Headers that say all this, each with three bytes of content at most."""
    file = io.BytesIO()
    for name, kind, target, size in members:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, target, size
        try:
            file.write(member.tobuf(tarfile.GNU_FORMAT))
        except ValueError:
            continue
        file.write(b"abc".ljust(512, b"\0") if size > 0 else b"")
    return file.getvalue() + bytes(1024)


def _tried(content: bytes, tmp_path: Path) -> None:
    archive, to = tmp_path / "a.tar", tmp_path / "in" / "to"
    shutil.rmtree(to.parent, ignore_errors=True)
    to.parent.mkdir()
    archive.write_bytes(content)
    narrow(lambda: tree_archive.archive_contents(archive), ArchiveError)
    narrow(lambda: tree_archive.unpacked_bytes(archive), ArchiveError)
    narrow(lambda: tree_archive.unpack_archive(archive, to, "0" * 64), ArchiveError)
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "in"] and os.listdir(to.parent) == ["to"]
    for folder, folders, files in os.walk(to):
        for name in (*folders, *files):
            inside = os.path.realpath(os.path.join(folder, name))
            assert inside.startswith(os.path.realpath(to) + "/") or not os.path.exists(inside)


@given(members=_MEMBERS)
@example(members=[("a", tarfile.REGTYPE, "", 3), ("a", tarfile.REGTYPE, "", 3)])
@example(members=[("a", tarfile.REGTYPE, "", 3), ("a/b", tarfile.REGTYPE, "", 3)])
@example(members=[("a/b", tarfile.REGTYPE, "", 3), ("a", tarfile.REGTYPE, "", 3)])
@example(members=[("a", tarfile.SYMTYPE, "b", 0), ("a", tarfile.SYMTYPE, "b", 0)])
@example(members=[("a", tarfile.SYMTYPE, "", 0)])
@example(members=[("x" * 300, tarfile.REGTYPE, "", 3)])
@example(members=[("a", tarfile.REGTYPE, "", 1 << 62)])
@example(members=[("a", tarfile.REGTYPE, "", -1)])
@example(members=[("a\0b", tarfile.REGTYPE, "", 3)])
def test_headers_that_say_anything(members: list[tuple[str, bytes, str, int]], tmp_path: Path) -> None:
    _tried(_archive(members), tmp_path)


def _packed(folder: Path) -> bytes:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "t" / "d").mkdir(parents=True)
    (folder / "t" / "d" / "run.py").write_text("print(1)\n")
    (folder / "t" / "ü").write_bytes(b"\0\1")
    (folder / "t" / "l").symlink_to("d/run.py")
    packed = tree_archive.pack_files(folder / "t", ["d/run.py", "ü", "l"], folder, ArchiveLimits())
    content = (folder / f"{packed.digest}.tar").read_bytes()
    shutil.rmtree(folder)
    return content


@given(data=st.data())
def test_a_damaged_archive(data: st.DataObject, tmp_path: Path) -> None:
    whole = _packed(tmp_path / "whole")
    _tried(data.draw(hostile(st.just(whole))), tmp_path)


@given(data=st.data())
def test_an_archive_whose_headers_are_damaged_and_sum_up(data: st.DataObject, tmp_path: Path) -> None:
    """Nothing in a tar file is checked but its headers, by a sum that anybody can write."""
    content = bytearray(_packed(tmp_path / "whole"))
    heads = [at for at in range(0, len(content) - 512, 512) if content[at + 257 : at + 262] == b"ustar"]
    for at in data.draw(st.lists(st.sampled_from(heads), min_size=1, max_size=3)):
        head = bytearray(data.draw(mutated(st.just(bytes(content[at : at + 512]))))[:512].ljust(512, b"\0"))
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        content[at : at + 512] = head
    _tried(bytes(content), tmp_path)


@given(
    key=st.sampled_from(("path", "linkpath", "size", "mtime", "GNU.sparse.map", "GNU.sparse.realsize", "x")),
    data=st.data(),
)
def test_headers_of_the_newer_form(key: str, data: st.DataObject, tmp_path: Path) -> None:
    value = data.draw(st.one_of(_NAMES, st.just("a\0b"), _SIZES.map(str), st.text(max_size=9)))
    member = tarfile.TarInfo("a")
    member.size = 3
    more = {key: value}
    if key.startswith("GNU"):
        more |= {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.name": "b",
            "GNU.sparse.size": "1000000000",
        }
    try:
        member.pax_headers = more
        head = member.tobuf(tarfile.PAX_FORMAT)
    except (ValueError, UnicodeError):
        return
    _tried(head + b"abc".ljust(512, b"\0") + bytes(1024), tmp_path)
