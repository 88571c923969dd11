"""What the user's code is, as a release: its tree, where it comes from, and an archive of it in the run directory."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import msgspec

from holdfast.cli import rundir
from holdfast.cli.flags import UsageError
from holdfast.cli.wording import counted
from holdfast.model.release import Release
from holdfast.wire import beside, tree
from holdfast.wire.listing import Listing, ListingError, listing, repository, run_git
from holdfast.wire.release_folder import ReleaseFolder
from holdfast.wire.spec import Entry
from holdfast.wire.tree import MIB, Bounds, Packed, TreeError

FIRST = Bounds(bytes=64 * MIB, files=20_000)  # what a job begins with is packed while somebody waits
LATER = Bounds()


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """The first release, and what is said of it."""

    release: Release
    said: str


class InPlace(Exception):
    """Why the user's tree is run where it stands."""


def first(entry: Entry, run_dir: Path, apart: Collection[Path], *, copied: bool) -> Begun:
    """Pack the tree that a job begins with; one that is no such tree, or is not to be copied, is run in place."""
    root, script = Path(), ""
    try:
        root, script = _tree_of(entry)
        if not copied:
            raise InPlace("--no-release was given")
        release, packed = _pack_first(entry, root, script, run_dir, apart)
    except (InPlace, ListingError, TreeError) as e:
        kept = str(root) if root != Path() else ""
        release = Release(number=1, root=kept, script=script, argv=entry.argv, source=kept, who=rundir.user())
        return Begun(release=release, said=f"release 1 is run where it stands: {e}")
    said = f"release 1 is {counted(packed.files, 'file')} of {release.source}, run in place while they stay as they are"
    return Begun(release=release, said=f"{said}; what is changed there later comes by holdfast update")


def _pack_first(
    entry: Entry, root: Path, script: str, run_dir: Path, apart: Collection[Path]
) -> tuple[Release, Packed]:
    if root in (Path("/"), Path.home().resolve(), Path(tempfile.gettempdir()).resolve()):
        raise InPlace(f"{root} is no folder of code")
    found = listing(root, (*apart, run_dir, rundir.home()), FIRST.files)
    _check(entry, root, script, found)
    packed = tree.pack(root, found.kept, run_dir / "releases", FIRST)
    _note_files(run_dir, root, found, packed)
    source = f"{root}{_commit(root) if found.git else ''}"
    release = Release(number=1, root=str(root), script=script, argv=entry.argv, source=source, who=rundir.user())
    return msgspec.structs.replace(release, digest=packed.digest), packed


def _note_files(run_dir: Path, root: Path, found: Listing, packed: Packed) -> None:
    """So that nodes of this host can see that the tree is as it was, and run it, before they have a copy of it."""
    loose = found.loose()
    files = {path: word for path, word in packed.words.items() if path not in loose}
    index = beside.Index(root=str(root), home=str(root), files=files)
    with contextlib.suppress(OSError):  # they will wait for the copy
        beside.write(ReleaseFolder(run_dir / "releases").copy_of(packed.digest), beside.edited(index)[1])


def _tree_of(entry: Entry) -> tuple[Path, str]:
    """The folder that is the user's code, and the script's path in it."""
    if not entry.python:
        raise InPlace(f"{entry.argv[0]} is not Python")
    if entry.module:
        if entry.python != sys.executable:
            raise InPlace(f"{entry.argv[0]} is a module for another Python than holdfast's")
        here = Path(entry.cwd).resolve()
        return repository(here) or here, ""
    path = Path(entry.cwd, entry.argv[0])
    here = path.parent.resolve()
    root = repository(here) or here
    return root, os.path.relpath(here / path.name, root)


def _check(entry: Entry, root: Path, script: str, found: Listing) -> None:
    if entry.module:
        top = entry.argv[0].split(".")[0]
        if not any(name.split("/")[-1] in (top, f"{top}.py") or f"{top}/" in name for name in found.kept):
            raise InPlace(f"the module {top} is not in {root}")
    elif script not in found.kept and not any(name.startswith(f"{script}/") for name in found.kept):
        raise InPlace(f"{script} is left out of {root}" + (", as git ignores it" if found.git else ""))
    if not any(name.endswith(".py") for name in found.kept):
        raise InPlace(f"{root} has no Python files")


def _commit(root: Path) -> str:
    """In words, after the name of the tree."""
    try:
        commit = os.fsdecode(run_git(root, "rev-parse", "--short", "HEAD")).strip()
        changed = bool(run_git(root, "status", "--porcelain"))
    except ListingError:
        return ""  # nothing was ever committed there
    return f" (git {commit}{', changed' if changed else ''})"


# --- later releases --------------------------------------------------------------------------------------------


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """A tree that was packed for an update."""

    digest: str
    root: str
    source: str
    files: int
    left_out: tuple[str, ...] = ()  # as the job may have written it


def bring(what: str | None, base: Release, run_dir: Path, apart: Collection[Path]) -> Brought:
    """Pack a folder, a commit of the job's repository, or the job's own tree as it is now; UsageError otherwise."""
    root = base.root
    if what is None and not root:
        raise UsageError("this job's code is not in one folder; say which is: holdfast update PATH")
    try:
        if what is None or os.path.isdir(what):
            return _bring_folder(Path(what or root).resolve(), base, run_dir, apart)
        return _bring_commit(what, root, run_dir)
    except (ListingError, TreeError) as e:
        raise UsageError(str(e)) from None


def _bring_folder(root: Path, base: Release, run_dir: Path, apart: Collection[Path]) -> Brought:
    if not root.is_dir():
        raise UsageError(f"{root} is not there; say where the code is: holdfast update PATH")
    if root == Path("/"):
        raise UsageError("/ is no folder of code; say where the code is: holdfast update PATH")
    found = listing(root, (*apart, run_dir, rundir.home()), LATER.files)
    known = tree.contents(run_dir / "releases" / f"{base.digest}.tar") if base.digest else {}
    written = found.written(known) if root == Path(base.home or base.root).resolve() else frozenset()
    packed = tree.pack(root, set(found.kept) - written, run_dir / "releases", LATER)
    brought = Brought(digest=packed.digest, root=str(root), source=str(root), files=packed.files)
    source = f"{root}{_commit(root) if found.git else ''}"
    return msgspec.structs.replace(brought, source=source, left_out=tuple(sorted(written)))


def _bring_commit(what: str, root: str, run_dir: Path) -> Brought:
    top = repository(Path(root)) if root else None
    if top is None:
        raise UsageError(f"{what} is no folder, and the job's code is in no git repository; name a folder")
    try:
        commit = os.fsdecode(run_git(top, "rev-parse", "--verify", "--quiet", f"{what}^{{commit}}")).strip()
    except ListingError:
        raise UsageError(f"{what} is neither a folder nor a commit of {top}") from None
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        place, index = Path(folder, "tree"), str(Path(folder, "index"))
        place.mkdir()
        run_git(top, "read-tree", commit, index=index)
        run_git(top, "checkout-index", "--all", f"--prefix={place}/", index=index)
        below = Path(root).resolve().relative_to(top.resolve())
        inside = place / below
        if not inside.is_dir():
            raise UsageError(f"{what} has no folder {below}, in which the job's code is")
        names = [os.path.relpath(os.path.join(f, n), inside) for f, _, files in os.walk(inside) for n in files]
        packed = tree.pack(inside, names, run_dir / "releases", LATER)
    return Brought(digest=packed.digest, root=root, source=f"{root} (git {commit[:10]})", files=packed.files)


def difference(run_dir: Path, before: str, after: Release) -> str:
    """In words: what an archive brings that is not in the one before; empty if nothing differs.

    What the release does not hold and still lies in the user's tree is linked into every copy: it is not removed.
    """
    old = tree.contents(run_dir / "releases" / f"{before}.tar")
    new = tree.contents(run_dir / "releases" / f"{after.digest}.tar")
    places = [place for place in (after.root, after.home) if place]
    missing = [path for path in old.keys() - new.keys() if not any(os.path.lexists(f"{p}/{path}") for p in places)]
    counts = {
        "changed": sum(1 for path in old.keys() & new.keys() if old[path] != new[path]),
        "added": len(new.keys() - old.keys()),
        "removed": len(missing),
    }
    return ", ".join(f"{counted(count, 'file')} {what}" for what, count in counts.items() if count)
