"""Archives of a tree of files, named by a digest of their content: packing, comparing and safe unpacking."""

import contextlib
import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from holdfast.wire.releases.release_file_selection import is_target_outside

MIB = 1 << 20
DIGEST = re.compile(r"[0-9a-f]{64}")
_MADE_AT = 315619200  # of every file: 1980, before which archives cannot tell the time


class ArchiveError(Exception):
    """A tree or an archive cannot be used; the text says why in one sentence."""


class UnsafeArchiveError(ArchiveError):
    """The archive would write outside of its tree, or a member is neither a file nor a link."""


class ArchiveLimits(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int = 1 << 30
    files: int = 100_000


class PackedArchive(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    files: int
    bytes: int
    words: dict[str, str]  # for the content of every file, by its path


class _TreeDigest:
    """A digest of paths, kinds and contents; owners and times do not count."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(b"holdfast tree 1\n")
        self.words: dict[str, str] = {}

    def add(self, path: str, kind: str, content: bytes) -> None:
        name = os.fsencode(path)
        self._hash.update(f"{kind} {len(name)} {len(content)}\n".encode() + name)
        self._hash.update(content)
        self.words[path] = content_digest(kind, content)

    def __str__(self) -> str:
        return self._hash.hexdigest()


def pack_files(root: Path, paths: Iterable[str], folder: Path, bounds: ArchiveLimits) -> PackedArchive:
    """Write these files of a tree to FOLDER/DIGEST.tar, whole or not at all."""
    ordered = sorted(paths, key=os.fsencode)
    size_bytes = _check_bounds(root, ordered, bounds)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".tar.{os.getpid()}"
    sum, count = _TreeDigest(), 0
    try:
        with tarfile.open(draft, "w", format=tarfile.PAX_FORMAT) as archive:
            for path in ordered:
                count += _add_file(archive, sum, root, path)
        draft.replace(folder / f"{sum}.tar")
    except OSError as e:
        raise ArchiveError(f"{e.filename or draft} cannot be packed: {e.strerror}") from None
    finally:
        draft.unlink(missing_ok=True)
    return PackedArchive(digest=str(sum), files=count, bytes=size_bytes, words=sum.words)


def _check_bounds(root: Path, paths: list[str], bounds: ArchiveLimits) -> int:
    sizes: dict[str, int] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            sizes[path] = os.lstat(root / path).st_size
    total = sum(sizes.values())
    if total > bounds.bytes:
        biggest = max(sizes, key=lambda path: sizes[path])
        raise ArchiveError(
            f"{root} has {total / MIB:.0f} MiB in {len(sizes)} files, above the limit of {bounds.bytes // MIB} MiB; "
            f"the biggest is {biggest} ({sizes[biggest] / MIB:.0f} MiB): have git ignore it, or move it elsewhere"
        )
    if len(sizes) > bounds.files:
        folders = [path.split("/")[0] for path in sizes]
        fullest = max(set(folders), key=folders.count)
        raise ArchiveError(
            f"{root} has {len(sizes)} files, above the limit of {bounds.files}; "
            f"most are in {fullest} ({folders.count(fullest)}): have git ignore it, or move it elsewhere"
        )
    return total


def _add_file(archive: tarfile.TarFile, sum: _TreeDigest, root: Path, path: str) -> bool:
    """Add a file to the archive and to the digest. Return False if the file is gone."""
    whole = root / path
    member = tarfile.TarInfo(path)
    member.mtime = _MADE_AT
    try:
        mode = os.lstat(whole).st_mode
        if stat.S_ISLNK(mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(whole)
            archive.addfile(member)
            sum.add(path, "l", os.fsencode(member.linkname))
            return True
        content = whole.read_bytes()
    except FileNotFoundError:
        return False
    member.mode, member.size = 0o755 if mode & stat.S_IXUSR else 0o644, len(content)
    archive.addfile(member, io.BytesIO(content))
    sum.add(path, "x" if mode & stat.S_IXUSR else "f", content)
    return True


def archive_contents(archive: Path) -> dict[str, str]:
    """Return the content digest of every file in an archive, by path."""
    found: dict[str, str] = {}
    with _open_archive(archive) as tar:
        for path, kind, content in _read_members(tar):
            found[path] = content_digest(kind, content)
    return found


def archive_files(archive: Path, paths: Collection[str], most_bytes: int) -> dict[str, bytes]:
    """Return the content of these files of an archive, by path; files of more than `most_bytes` are left out."""
    with _open_archive(archive) as tar:
        return {path: content for path, _, content in _read_members(tar, paths) if len(content) <= most_bytes}


def content_digest(kind: str, content: bytes) -> str:
    return f"{kind} {hashlib.sha256(content).hexdigest()}"


def unpacked_bytes(archive: Path) -> int:
    with _open_archive(archive) as tar:
        return sum(member.size + 4096 for member in _checked_headers(tar))


def unpack_archive(archive: Path, to: Path, digest: str) -> dict[str, str]:
    """Unpack into a new folder, and return the content digest of every file by path. Raise ArchiveError if the content
    does not match `digest`, or if a file would land outside the folder."""
    to.mkdir()
    sum = _TreeDigest()
    links: set[str] = set()
    folders = {""}  # made already
    with _open_archive(archive) as tar:
        for path, kind, content in _read_members(tar):
            _check_member_path(path, links)
            sum.add(path, kind, content)
            if kind == "l":
                links.add(path)
            _write_member(to, path, kind, content, folders)
    if str(sum) != digest:
        raise ArchiveError(f"the archive {archive.name} is damaged: its content does not match {digest[:12]}")
    return sum.words


@contextlib.contextmanager
def _open_archive(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(archive, "r:") as tar:
            yield tar
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as e:  # the last two: numbers in its headers
        raise ArchiveError(f"the archive {archive.name} is damaged: {e}") from None


def _checked_headers(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield an archive's members. Raise ArchiveError at a member that is cut off, or neither file nor link."""
    assert tar.name is not None
    size_bytes = os.stat(tar.name).st_size
    for member in tar:
        if not (member.issym() or member.isreg()) or member.issparse():
            raise UnsafeArchiveError(f"the archive holds {member.name}, which is neither a file nor a link")
        if not 0 <= member.size <= size_bytes - member.offset_data:
            raise ArchiveError(f"the archive is cut off in {member.name}")
        yield member


def _read_members(tar: tarfile.TarFile, paths: Collection[str] | None = None) -> Iterator[tuple[str, str, bytes]]:
    for member in _checked_headers(tar):
        if paths is not None and member.name not in paths:
            continue
        if member.issym():
            yield member.name, "l", os.fsencode(member.linkname)
            continue
        file: IO[bytes] | None = tar.extractfile(member)
        assert file is not None
        content = file.read()
        if len(content) != member.size:
            raise ArchiveError(f"the archive is cut off in {member.name}")
        yield member.name, "x" if member.mode & stat.S_IXUSR else "f", content


def _check_member_path(path: str, links: set[str]) -> None:
    parts = path.split("/")
    if os.path.isabs(path) or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise UnsafeArchiveError(f"the archive would write to {path}, outside of its tree")
    if any("/".join(parts[:depth]) in links for depth in range(1, len(parts))):
        raise UnsafeArchiveError(f"the archive would write through a link, to {path}")


def _write_member(to: Path, path: str, kind: str, content: bytes, folders: set[str]) -> None:
    try:
        if (folder := os.path.dirname(path)) not in folders:
            os.makedirs(to / folder, exist_ok=True)
            folders.add(folder)
        if kind == "l":
            _write_link(to, path, os.fsdecode(content))
        else:
            _write_file(f"{to}/{path}", content, executable=kind == "x")
    except OSError as e:  # the disk is full, or two members have one name
        raise ArchiveError(f"{path} of the archive cannot be written: {e.strerror}") from None


def _write_link(to: Path, path: str, target: str) -> None:
    if is_target_outside(path, target) or "\0" in target:
        raise UnsafeArchiveError(f"the archive has a link out of its tree: {path} to {target}")
    (to / path).symlink_to(target)


def _write_file(path: str, content: bytes, *, executable: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o755 if executable else 0o644)
    with open(fd, "wb") as file:
        file.write(content)
    os.utime(path, (_MADE_AT, _MADE_AT))
