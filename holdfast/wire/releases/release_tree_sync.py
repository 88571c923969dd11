"""Keeps a release copy and the user's tree consistent: finds edits, links the user's files, moves outputs back."""

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from holdfast.decoding import from_json
from holdfast.wire import run_and_node_specs
from holdfast.wire.releases import tree_archive
from holdfast.wire.releases.release_file_selection import ReleaseFilesError, is_stale, list_release_files, readable_path
from holdfast.wire.releases.staged_release import is_within

_FILES = ".files"
_RAN = ".ran"  # beside a copy that ranks were started from: work may lie there
_RACY_NS = 2 * 10**9  # a file that was touched so lately may be touched again within one tick of its clock

Stamp = tuple[int, int, int, int]


class TreeIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The file RELEASES/NAME.files: the files of a release copy, and which files of the user's tree equal them. A stamp
    tells whether a file has changed since it was compared."""

    root: str  # the tree that it was taken from
    home: str  # the job's own tree, in which its work is kept
    files: dict[str, str]  # a word for the content of each, by its path
    equal: dict[str, Stamp] = {}


def read_index(at: Path) -> TreeIndex | None:
    path = str(at.with_name(at.name + _FILES))
    try:
        return _decode_index(path, _file_stamp(path))
    except (OSError, msgspec.DecodeError):
        return None


@functools.lru_cache(maxsize=2)
def _decode_index(path: str, stamp: Stamp) -> TreeIndex:
    """Every launch reads it, and it may list thousands of files. A file that was changed has another stamp."""
    return from_json(Path(path).read_bytes(), TreeIndex)


def write_index(at: Path, index: TreeIndex) -> None:
    run_and_node_specs.publish_file(at.with_name(at.name + _FILES), msgspec.json.encode(index))


def forget_index(at: Path) -> None:
    for suffix in (_FILES, _RAN):
        at.with_name(at.name + suffix).unlink(missing_ok=True)


def make_index(files: dict[str, str], copy: Path, root: str, home: str) -> TreeIndex:
    """Return the index of a newly unpacked release copy. Files that scripts may have written are deleted from the copy;
    links to the user's own files will take their place."""
    loose: Collection[str] = ()
    with contextlib.suppress(ReleaseFilesError):
        loose = list_release_files(Path(root)).possible_outputs() if root and os.path.isdir(root) else ()
    for path in files.keys() & loose:
        (copy / path).unlink()
    return TreeIndex(root=root, home=home or root, files={p: word for p, word in files.items() if p not in loose})


@contextlib.contextmanager
def lock_trees(folder: Path) -> Iterator[None]:
    """Lock a host's folder of release copies, so that only one of the host's processes at a time moves files."""
    with (folder / ".lock").open("ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- equal? ----------------------------------------------------------------------------------------------------


def find_edits(index: TreeIndex) -> tuple[list[str], TreeIndex]:
    """Return the user's files that differ from the release, and a new index. A file with its old stamp is not read."""
    touched = _find_touched(index)
    if not touched:
        return [], index
    equal = {path: stamp for path, stamp in index.equal.items() if path not in touched}
    differ = []
    for path in touched:
        whole = os.path.join(index.root, path)
        try:
            stamp = _file_stamp(whole)
            if _file_digest(whole) != index.files[path]:
                differ.append(path)
                continue
        except OSError:
            differ.append(path)
            continue
        if max(stamp[1:3]) < time.time_ns() - _RACY_NS:
            equal[path] = stamp
    return differ, msgspec.structs.replace(index, equal=equal)


def _find_touched(index: TreeIndex) -> dict[str, None]:
    """Return the user's files without the stamp that they had when they were last compared, in the release's order."""
    touched: dict[str, None] = {}
    try:
        root = os.open(index.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return dict.fromkeys(index.files)
    known = index.equal
    try:
        for path in index.files:  # of thousands, at every launch
            try:
                found = os.stat(path, dir_fd=root, follow_symlinks=False)
            except OSError:
                touched[path] = None
                continue
            if known.get(path) != (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino):
                touched[path] = None
    finally:
        os.close(root)
    return touched


def _file_stamp(path: str) -> Stamp:
    found = os.lstat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _file_digest(path: str) -> str:
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return tree_archive.content_digest("l", os.fsencode(os.readlink(path)))
    return tree_archive.content_digest("x" if mode & stat.S_IXUSR else "f", Path(path).read_bytes())


# --- what lies in the copy -------------------------------------------------------------------------------------


def prepare_tree(at: Path, index: TreeIndex) -> None:
    """Mark a release copy as used by ranks, and link the user's files outside the release into it."""
    at.with_name(at.name + _RAN).touch()
    link_user_files(at, index)


def link_user_files(at: Path, index: TreeIndex) -> None:
    """Make links in the release copy to user files outside the release, except to the folder of release copies."""
    for source in dict.fromkeys((index.root, index.home)):
        if source and os.path.isdir(source):
            _link_folder(Path(source), at, os.path.realpath(at.parent))


def _link_folder(source: Path, at: Path, folder: str) -> None:
    with os.scandir(at) as entries:
        ours = {entry.name: entry for entry in entries}
    for name, entry in [*ours.items()]:
        if entry.is_symlink() and not os.path.exists(entry.path) and os.readlink(entry.path) == str(source / name):
            os.unlink(entry.path)  # a script could not make a folder in the place of a link that leads nowhere
            del ours[name]
    with os.scandir(source) as entries:
        theirs = [entry for entry in entries if not is_stale(entry.name)]
    for entry in theirs:
        known = ours.get(entry.name)
        if known is None:
            if not is_within(folder, os.path.realpath(entry.path)):
                (at / entry.name).symlink_to(entry.path)
        elif known.is_dir(follow_symlinks=False) and entry.is_dir():
            _link_folder(Path(entry.path), Path(known.path), folder)


class GatheredFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files that ranks made in a release copy: those moved to the user's tree, and those that could not be."""

    moved: tuple[str, ...] = ()
    both: tuple[str, ...] = ()  # of those moved: something newer has the name, and each is kept
    stuck: tuple[str, ...] = ()


def newest(folder: Path) -> Path | None:
    """Return the release copy from which ranks were last started; None if there is none."""
    ran = max(folder.glob("*" + _RAN), key=lambda path: path.stat().st_mtime_ns, default=None)
    return ran and ran.with_name(ran.name.removesuffix(_RAN))


def gather_all(folder: Path) -> Iterator[tuple[TreeIndex, GatheredFiles]]:
    """Move ranks' files from all release copies to the user's tree. Yield each copy that had such files."""
    for path in sorted(folder.glob("*" + _RAN)):
        at = path.with_name(path.name.removesuffix(_RAN))
        with lock_trees(folder):
            index, gathered = gather_files(at)
        if gathered.moved or gathered.stuck:
            yield index, gathered


def gather_files(at: Path) -> tuple[TreeIndex, GatheredFiles]:
    """Move files that ranks made in the release copy to the user's tree, and leave links in their place."""
    index = read_index(at) or TreeIndex(root="", home="", files={})
    if not at.with_name(at.name + _RAN).exists() or not index.home or not os.path.isdir(index.home):
        return index, GatheredFiles()
    folders = {part for path in index.files for part in _parent_folders(path)}
    moved: list[str] = []
    both: list[str] = []
    stuck: list[str] = []

    def visit(path: str) -> None:
        ours, theirs = at / path, Path(index.home, path)
        if path in index.files or is_stale(path) or leads_home(ours, index):
            return
        if ours.is_dir() and not ours.is_symlink() and (path in folders or theirs.is_dir()):
            _visit_folder(ours, path, visit)
            if path not in folders:
                _fold(ours, theirs, index)
            return
        try:
            if same(ours, theirs):
                ours.unlink()
                _leave_link(ours, theirs)
            elif to := _move_file(ours, theirs, at.name):
                moved.append(os.path.join(os.path.dirname(path), to.name))
                both.extend(moved[-1:] if to != theirs else ())
            else:
                _visit_folder(ours, path, visit)
        except FileNotFoundError:
            pass  # a rank has removed it meanwhile
        except OSError as e:
            stuck.append(f"{path} stays in {at}: {e.strerror}")

    _visit_folder(at, "", visit)
    return index, GatheredFiles(moved=tuple(moved), both=tuple(both), stuck=tuple(stuck))


def _visit_folder(folder: Path, path: str, visit: Callable[[str], None]) -> None:
    for name in sorted(os.listdir(folder)):
        visit(os.path.join(path, name))


def _parent_folders(path: str) -> Iterator[str]:
    while path := os.path.dirname(path):
        yield path


def leads_home(path: Path, index: TreeIndex) -> bool:
    """Return whether the path is a link into the user's tree; the link's target may be gone."""
    if not path.is_symlink():
        return False
    to = os.readlink(path)
    return os.path.isabs(to) and any(is_within(to, home) for home in (index.home, index.root) if home)


def same(ours: Path, theirs: Path) -> bool:
    """Return whether the user's tree already has the file: the same inode, or a file of equal size and time."""
    try:
        here, there = os.lstat(ours), os.lstat(theirs)
    except OSError:
        return False
    if os.path.samestat(here, there):
        return True
    files = stat.S_ISREG(here.st_mode) and stat.S_ISREG(there.st_mode)
    exact = here.st_mtime_ns % 10**9 != 0  # there are file systems whose clocks know whole seconds only
    return files and exact and (here.st_size, here.st_mtime_ns) == (there.st_size, there.st_mtime_ns)


def _fold(ours: Path, theirs: Path, index: TreeIndex) -> None:
    """Replace a folder of the copy by one link to the user's folder, if it holds nothing but links into the user's
    tree. A rank that then deletes a file in this folder deletes the user's file."""
    with os.scandir(ours) as entries:
        paths = [Path(entry.path) for entry in entries]
    if not theirs.is_dir() or not all(leads_home(path, index) for path in paths):
        return
    with contextlib.suppress(OSError):  # a rank has made something in it meanwhile
        for path in paths:
            path.unlink()
        ours.rmdir()
        ours.symlink_to(theirs)


def destination(ours: Path, theirs: Path, name: str) -> Path:
    """Return the path in the user's tree for a file of the copy. If the tree has a newer file or a folder at that path,
    return a path with another name beside it."""
    try:
        there = os.lstat(theirs).st_mtime_ns
    except FileNotFoundError:
        return theirs
    links = ours.is_symlink() and theirs.is_symlink()
    if not links:
        with contextlib.suppress(OSError):  # a link that leads nowhere
            there = max(there, os.stat(theirs).st_mtime_ns)
    apart = there > os.lstat(ours).st_mtime_ns or (theirs.is_dir() and not links)
    return theirs.with_name(f"{theirs.name}.of-{name}") if apart else theirs


def _move_file(ours: Path, theirs: Path, name: str) -> Path | None:
    """Move a file or folder from `ours` to `theirs`, leave a link in its place, and return the new path. On one disk
    this is a rename, so a rank that writes the file keeps it open. To another disk a file is copied; of a folder, an
    empty one is made there and None is returned."""
    if os.path.realpath(ours.parent) == os.path.realpath(theirs.parent):
        raise FileNotFoundError(ours)  # it is there already
    theirs.parent.mkdir(parents=True, exist_ok=True)
    to = destination(ours, theirs, name)
    try:
        os.rename(ours, to)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
        if ours.is_dir() and not ours.is_symlink():
            theirs.mkdir(exist_ok=True)
            return None
        copy(ours, to)
        ours.unlink()
    _leave_link(ours, theirs)
    return to


def _leave_link(ours: Path, theirs: Path) -> None:
    with contextlib.suppress(FileExistsError):  # a rank was faster, and its file comes next time
        ours.symlink_to(theirs)


def copy(ours: Path, to: Path) -> None:
    """Copy a file to another disk, whole or not at all. Raise OSError if the file changes during the copy."""
    draft = to.with_name(f".{to.name}.{os.getpid()}")
    before = _file_stamp(str(ours))
    try:
        shutil.copy2(ours, draft, follow_symlinks=False)
        if _file_stamp(str(ours)) != before:
            raise OSError(errno.EBUSY, "it is being written")
        if not draft.is_symlink():
            with draft.open("rb") as file:
                os.fsync(file.fileno())  # the name must not come to lead to less than it did
        os.replace(draft, to)
    finally:
        draft.unlink(missing_ok=True)


def describe_gathered(index: TreeIndex, gathered: GatheredFiles) -> str:
    """Describe gathered files in one sentence for the console."""
    said = [*gathered.stuck]
    if gathered.moved:
        more = len(gathered.moved) - 3
        names = ", ".join(gathered.moved[:3]) + (f" and {more} more" if more > 0 else "")
        said.insert(0, f"files that ranks made beside the script are now in {index.home}: {names}")
    for path in gathered.both[:3]:
        theirs, ours = path.rpartition(".of-")[0], os.path.basename(path)
        said.append(f"{theirs} there is newer and stays; the ranks' file is beside it as {ours}")
    return readable_path("; ".join(said))
