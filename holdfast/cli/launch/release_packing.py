"""Packs the user's code as a release: finds its tree and source, and writes an archive to the run directory."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from holdfast.cli.run_dirs import run_dir_secrets, run_directory
from holdfast.cli.run_dirs.local_run_list import HOME_NAMES
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.config import Settings
from holdfast.controller.access.user_tokens import read_tokens
from holdfast.model.code_release import Release
from holdfast.wire.releases import release_tree_sync, secret_file_search, tree_archive
from holdfast.wire.releases.host_release_copies import ReleaseFolder
from holdfast.wire.releases.release_file_selection import (
    ReleaseFiles,
    ReleaseFilesError,
    find_repository,
    list_release_files,
    run_git,
)
from holdfast.wire.releases.tree_archive import MIB, ArchiveError, ArchiveLimits, PackedArchive
from holdfast.wire.run_and_node_specs import EntryPoint

FIRST = ArchiveLimits(bytes=64 * MIB, files=20_000)  # what a job begins with is packed while somebody waits
LATER = ArchiveLimits()


class FirstRelease(msgspec.Struct, frozen=True, kw_only=True):
    """The first release, and a sentence about it for the console."""

    release: Release
    said: str
    secret: tuple[str, ...] = ()  # left out, as secrets of holdfast are in it


class KeptOut(msgspec.Struct, frozen=True):
    """Paths and secrets to keep out of a release, with all files that contain such a secret."""

    paths: tuple[Path, ...] = ()
    secrets: tuple[bytes, ...] = ()
    digests: tuple[str, ...] = ()  # of people's tokens, which are stored nowhere


def keep_out(run_dir: Path, settings: Settings, token_file: str | None, paths: Iterable[str | Path]) -> KeptOut:
    """Return what to leave out of this run's releases: `paths`, and all files that contain a secret of holdfast."""
    secrets = secret_file_search.read_secrets(run_dir, settings, token_file, os.environ)
    digests = tuple(token.digest for token in read_tokens(run_dir_secrets.people_path()))
    return KeptOut(tuple(map(Path, paths)), secrets, digests)


class RunInPlace(Exception):
    """Raised if the user's tree must run in place, without a copy; the text says why."""


def pack_first_release(entry: EntryPoint, run_dir: Path, apart: KeptOut, *, copied: bool) -> FirstRelease:
    """Pack the tree that a job begins with; a tree that cannot or must not be copied is run in place."""
    root, script = Path(), ""
    try:
        root, script = _find_tree(entry)
        if not copied:
            raise RunInPlace("--no-release was given")
        release, packed, secret = _pack_tree(entry, root, script, run_dir, apart)
    except (RunInPlace, ReleaseFilesError, ArchiveError) as e:
        kept = str(root) if root != Path() else ""
        release = Release(
            number=1, root=kept, script=script, argv=entry.argv, source=kept, who=run_directory.user_name()
        )
        return FirstRelease(release=release, said=f"release 1 runs in place, without a copy: {e}")
    files = counted_noun(packed.files, "file")
    said = f"release 1 is {files} of {release.source}, run in place until one of them changes"
    said = f"{said}; holdfast update brings later changes{secrets_text(secret)}"
    return FirstRelease(release=release, said=said, secret=tuple(secret))


def _pack_tree(
    entry: EntryPoint, root: Path, script: str, run_dir: Path, apart: KeptOut
) -> tuple[Release, PackedArchive, Sequence[str]]:
    if root in (Path("/"), Path.home().resolve(), Path(tempfile.gettempdir()).resolve()):
        raise RunInPlace(f"{root} is not a folder of code")
    if secret_file_search.is_run_folder(str(root)):
        raise RunInPlace(f"{root} is a run directory")
    found = list_release_files(root, _paths_apart(run_dir, apart), FIRST.files)
    found, secret = _without_secrets(root, found, apart)
    _check_tree(entry, root, script, found, secret)
    packed = tree_archive.pack_files(root, found.kept, run_dir / "releases", FIRST)
    _note_files(run_dir, root, found, packed)
    source = f"{root}{_commit_text(root) if found.git else ''}"
    release = Release(
        number=1, root=str(root), script=script, argv=entry.argv, source=source, who=run_directory.user_name()
    )
    return msgspec.structs.replace(release, digest=packed.digest), packed, secret


def _paths_apart(run_dir: Path, apart: KeptOut) -> tuple[Path, ...]:
    home = run_directory.holdfast_home()  # which may be the very folder of the script
    return (*apart.paths, run_dir, home, *(home / name for name in HOME_NAMES))


def _without_secrets(root: Path, found: ReleaseFiles, apart: KeptOut) -> tuple[ReleaseFiles, tuple[str, ...]]:
    """Return the files except those that contain holdfast's secrets, and the names of what was left out."""
    secret = secret_file_search.find_secrets(root, found.kept, apart.secrets, apart.digests)
    kept = tuple(path for path in found.kept if path not in secret)
    return msgspec.structs.replace(found, kept=kept), tuple(sorted(set(secret.values())))


def secrets_text(paths: Sequence[str]) -> str:
    """Return a clause that names what was left out because of secrets; "" if nothing was."""
    return f"; left out, because secrets of holdfast are in it: {name_some(paths)}" if paths else ""


def name_some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _note_files(run_dir: Path, root: Path, found: ReleaseFiles, packed: PackedArchive) -> None:
    """Write an index of the user's tree, so that nodes of this host need not wait for a copy of an unchanged tree."""
    loose = found.possible_outputs()
    files = {path: word for path, word in packed.words.items() if path not in loose}
    index = release_tree_sync.TreeIndex(root=str(root), home=str(root), files=files)
    with contextlib.suppress(OSError):  # they will wait for the copy
        release_tree_sync.write_index(
            ReleaseFolder(run_dir / "releases").copy_of(packed.digest), release_tree_sync.find_edits(index)[1]
        )


def _find_tree(entry: EntryPoint) -> tuple[Path, str]:
    """Return the folder of the user's code and the script's path in it. Raise RunInPlace if the user's program is not
    Python, or is a module for another Python than holdfast's."""
    if not entry.python:
        raise RunInPlace(f"{entry.argv[0]} is not Python")
    if entry.module:
        if entry.python != sys.executable:
            raise RunInPlace(f"{entry.argv[0]} is a module for another Python than holdfast's")
        here = Path(entry.cwd).resolve()
        return find_repository(here) or here, ""
    path = Path(entry.cwd, entry.argv[0])
    here = path.parent.resolve()
    root = find_repository(here) or here
    return root, os.path.relpath(here / path.name, root)


def _check_tree(entry: EntryPoint, root: Path, script: str, found: ReleaseFiles, secret: Sequence[str]) -> None:
    if entry.module:
        top = entry.argv[0].split(".")[0]
        if not any(name.split("/")[-1] in (top, f"{top}.py") or f"{top}/" in name for name in found.kept):
            raise RunInPlace(f"the module {top} is not in {root}")
    elif script not in found.kept and not any(name.startswith(f"{script}/") for name in found.kept):
        if script in secret:
            raise RunInPlace(f"{script} has a secret of holdfast in it; take it out of the file")
        raise RunInPlace(f"{script} is left out of {root}" + (", because git ignores it" if found.git else ""))
    if not any(name.endswith(".py") for name in found.kept):
        raise RunInPlace(f"{root} has no Python files")


def _commit_text(root: Path) -> str:
    """Return the tree's commit as text to put after the tree's name; "" if there is no commit."""
    try:
        commit = os.fsdecode(run_git(root, "rev-parse", "--short", "HEAD")).strip()
        changed = bool(run_git(root, "status", "--porcelain"))
    except ReleaseFilesError:
        return ""  # nothing was ever committed there
    return f" (git {commit}{', changed' if changed else ''})"


# --- later releases --------------------------------------------------------------------------------------------


class PackedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The user's code, packed into an archive for an update."""

    digest: str
    root: str
    source: str
    files: int
    left_out: tuple[str, ...] = ()  # as the job may have written it
    secret: tuple[str, ...] = ()  # left out as well, as secrets of holdfast are in it


def pack_update(what: str | None, base: Release, run_dir: Path, apart: KeptOut) -> PackedUpdate:
    """Pack a folder, a commit of the job's repository, or the job's own tree. Raise UsageError if that fails."""
    root = base.root
    if what is None and not root:
        raise UsageError("this job's code is not in one folder; name the folder: holdfast update PATH")
    try:
        if what is None or os.path.isdir(what):
            return _pack_folder(Path(what or root).resolve(), base, run_dir, apart)
        return _pack_commit(what, root, run_dir, apart)
    except (ReleaseFilesError, ArchiveError) as e:
        raise UsageError(str(e)) from None


def _pack_folder(root: Path, base: Release, run_dir: Path, apart: KeptOut) -> PackedUpdate:
    if not root.is_dir():
        raise UsageError(f"{root} is gone; name the folder of the code: holdfast update PATH")
    if root == Path("/"):
        raise UsageError("/ is not a folder of code; name the folder: holdfast update PATH")
    found = list_release_files(root, _paths_apart(run_dir, apart), LATER.files)
    found, secret = _without_secrets(root, found, apart)
    known = tree_archive.archive_contents(run_dir / "releases" / f"{base.digest}.tar") if base.digest else {}
    written = found.new_outputs(known) if root == Path(base.home or base.root).resolve() else frozenset()
    packed = tree_archive.pack_files(root, set(found.kept) - written, run_dir / "releases", LATER)
    brought = PackedUpdate(digest=packed.digest, root=str(root), source=str(root), files=packed.files)
    source = f"{root}{_commit_text(root) if found.git else ''}"
    return msgspec.structs.replace(brought, source=source, left_out=tuple(sorted(written)), secret=secret)


def _pack_commit(what: str, root: str, run_dir: Path, apart: KeptOut) -> PackedUpdate:
    top = find_repository(Path(root)) if root else None
    if top is None:
        raise UsageError(f"{what} is not a folder, and the job's code is in no git repository; name a folder")
    try:
        commit = os.fsdecode(run_git(top, "rev-parse", "--verify", "--quiet", f"{what}^{{commit}}")).strip()
    except ReleaseFilesError:
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
        found, secret = _without_secrets(inside, ReleaseFiles(tuple(names), ()), apart)
        packed = tree_archive.pack_files(inside, found.kept, run_dir / "releases", LATER)
    source = f"{root} (git {commit[:10]})"
    return PackedUpdate(digest=packed.digest, root=root, source=source, files=packed.files, secret=secret)


def describe_difference(run_dir: Path, before: str, after: Release) -> str:
    """Say how many files an archive changes, adds and removes compared with the one before; empty if nothing differs. A
    file that is in the user's tree but not in the archive is linked into every copy, so it does not count as
    removed."""
    old = tree_archive.archive_contents(run_dir / "releases" / f"{before}.tar")
    new = tree_archive.archive_contents(run_dir / "releases" / f"{after.digest}.tar")
    places = [place for place in (after.root, after.home) if place]
    missing = [path for path in old.keys() - new.keys() if not any(os.path.lexists(f"{p}/{path}") for p in places)]
    counts = {
        "changed": sum(1 for path in old.keys() & new.keys() if old[path] != new[path]),
        "added": len(new.keys() - old.keys()),
        "removed": len(missing),
    }
    return ", ".join(f"{counted_noun(count, 'file')} {what}" for what, count in counts.items() if count)
