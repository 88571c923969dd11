"""Decides which files of a folder belong to a release of the user's code and which are left out."""

import os
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

_GIT_S = 10.0
_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
_BIG_BYTES = 16 << 20  # files above this are no code, unless git was told of them
_CACHES = frozenset(
    ".git .hg .svn __pycache__ node_modules .venv venv .tox .nox .mypy_cache .ruff_cache .pytest_cache .hypothesis "
    ".ipynb_checkpoints .cache wandb".split()
)
_STALE = ("__pycache__", ".pyc")  # bytecode of one tree is never another's
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")  # a folder that holds one of these
_PYTHON = (".py", ".pyi", ".pyx", ".pxd", ".ipynb")
_SOURCE = (
    *_PYTHON,
    *".c .cc .cpp .cu .cuh .h .hpp .rs .sh .toml .yaml .yml .ini .cfg .conf .proto .jinja .j2 .gin .md .rst".split(),
)
_STATE = tuple(  # what training leaves behind; nobody writes it by hand
    ".pt .pth .ckpt .bin .safetensors .distcp .npy .npz .pkl .pickle .h5 .hdf5 .onnx .gguf .arrow .parquet .log "
    ".out .err .metadata".split()
)

_OURS = ".holdfast-"  # how names of holdfast's own files begin, in a folder of checkpoints
_CHECKPOINT = ("holdfast.json", ".metadata")  # of a folder that holds one: all in it is state


class ReleaseFilesError(Exception):
    """Says in one sentence why a folder cannot be listed."""


class ReleaseFiles(msgspec.Struct, frozen=True):
    """The sorted paths of a folder's files: `kept` are in the release, `left_out` are not. A folder that is ignored as
    a whole is one path in `left_out`."""

    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    git: bool = False
    tracked: frozenset[str] = frozenset()  # of those kept: what git has been told of, and so is somebody's work

    def possible_outputs(self) -> frozenset[str]:
        """Return the release's files that a script may have written: those untracked by git that are not source."""
        return frozenset(path for path in self.kept if path not in self.tracked and not path.endswith(_SOURCE))

    def new_outputs(self, known: Collection[str]) -> frozenset[str]:
        """Return the release's files that may be a job's output. Files tracked by git cannot be, nor those in `known`,
        an earlier release. Any other file is returned if it is not source. A source file is returned only if it lies in
        a folder with such files or with files left out of the release, but without Python files."""
        came = {path for path in self.kept if path not in known and path not in self.tracked}
        odd = {path for path in came if not path.endswith(_SOURCE)}
        places = {folder for path in (*odd, *self.left_out) for folder in _parent_folders(path)}
        places -= {folder for path in self.kept if path.endswith(_PYTHON) for folder in _parent_folders(path)}
        return frozenset(odd | {path for path in came if places & {*_parent_folders(path)}})


def readable_path(path: str) -> str:
    """Replace what is not UTF-8 in a path, so that it can be written to a journal or sent to a node."""
    return path.encode("utf-8", "replace").decode()


def is_stale(name: str) -> bool:
    return name.endswith(_STALE)


def _parent_folders(path: str) -> Iterator[str]:
    """Yield the folders that a path lies in, below the root."""
    while path := os.path.dirname(path):
        yield path


def find_repository(folder: Path) -> Path | None:
    """Return the top of the git work tree that a folder lies in, or None."""
    try:
        found = run_git(folder, "rev-parse", "--show-toplevel")
    except ReleaseFilesError:
        return None
    top = os.fsdecode(found).rstrip("\n")
    return Path(top) if top else None  # a bare repository has no work tree


def list_release_files(root: Path, apart: Collection[Path] = (), most: int = 1 << 20) -> ReleaseFiles:
    """List a folder's files: those in the release and those left out. Files are left out if git ignores them or,
    without git, if they are of kinds that are never code. Traces of training and links out of the folder are left out
    too. Paths in `apart` are in neither list. Raise ReleaseFilesError if the release has more than `most` files."""
    not_ours = {os.path.relpath(path, root) for path in map(os.path.realpath, apart)}
    git = find_repository(root) is not None
    try:
        kept, left_out, tracked = _list_by_git(root) if git else ([], [], set())
        if not kept:  # or git ignores the whole folder
            git = False
            kept, left_out = _list_by_folder(root, not_ours, most)
    except OSError as e:
        raise ReleaseFilesError(f"{e.filename or root} cannot be read: {e.strerror}") from None
    found = set(_drop_excluded(kept, not_ours))
    saved = {os.path.dirname(path) for path in found if os.path.basename(path) in _CHECKPOINT} - {""}
    work = {path for path in found - tracked if _is_state(root, path) or saved & {*_parent_folders(path)}}
    outside = work | {path for path in found if _is_link_out(root, path) or readable_path(path) != path}
    inside = sorted(found - outside)
    if len(inside) > most:
        raise ReleaseFilesError(f"{root} has more than {most} files")
    rest = tuple(sorted(map(readable_path, {*_drop_excluded(left_out, not_ours), *outside})))
    return ReleaseFiles(tuple(inside), rest, git, frozenset(tracked.intersection(inside)))


def _drop_excluded(paths: list[str], not_ours: Collection[str]) -> Iterator[str]:
    for path in paths:
        parts = path.rstrip("/").split("/")
        if not any("/".join(parts[:depth]) in not_ours for depth in range(1, len(parts) + 1)):
            yield path.rstrip("/")


def _is_state(root: Path, path: str) -> bool:
    return path.endswith(_STATE) or os.path.basename(path).startswith(_OURS) or _is_big(os.path.join(root, path))


def _is_link_out(root: Path, path: str) -> bool:
    """Return whether a path is a link that leads out of the tree; such links are left out like ignored files."""
    whole = os.path.join(root, path)
    if not os.path.islink(whole):
        return False
    return is_target_outside(path, os.readlink(whole))


def is_target_outside(path: str, target: str) -> bool:
    """Return whether a link at this path with this target leads out of the root."""
    to = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return os.path.isabs(target) or to == ".." or to.startswith("../")


# --- git -------------------------------------------------------------------------------------------------------


def run_git(folder: Path, *words: str, index: str = "") -> bytes:
    """Run git and return its output. Git's environment variables are removed; they could name another repository."""
    env = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    env |= {"GIT_INDEX_FILE": index} if index else {}
    argv = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ReleaseFilesError(f"git {words[0]} in {folder} takes longer than {_GIT_S:g} s") from None
    except OSError as e:
        raise ReleaseFilesError(f"git cannot be run: {e.strerror}") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()
        raise ReleaseFilesError(f"git {words[0]} in {folder} failed: {why[-1] if why else f'code {done.returncode}'}")
    return done.stdout


def _list_by_git(root: Path) -> tuple[list[str], list[str], set[str]]:
    kept, left_out = [], [".git"] if os.path.lexists(root / ".git") else []
    tracked = set(_split_names(run_git(root, "ls-files", "-z")))
    for path in sorted(tracked.union(_split_names(run_git(root, "ls-files", "-z", "-o", "--exclude-standard")))):
        whole = root / path
        if whole.is_dir() and not whole.is_symlink():  # a submodule, or a repository that was cloned into this one
            inner, ignored, known = _list_by_git(whole)
            kept += [os.path.join(path, name) for name in inner]
            left_out += [os.path.join(path, name) for name in ignored]
            tracked.update(os.path.join(path, name) for name in known)
        elif _is_file(str(whole)):  # and has not been deleted
            kept.append(path)
    if kept:  # git cannot tell what is ignored in a folder that is ignored itself
        left_out += _split_names(run_git(root, "ls-files", "-z", "-oi", "--exclude-standard", "--directory"))
    return kept, left_out, tracked


def _split_names(listed: bytes) -> list[str]:
    return sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})


def _is_file(path: str) -> bool:
    return os.path.islink(path) or os.path.isfile(path)


# --- a plain folder --------------------------------------------------------------------------------------------


def _list_by_folder(root: Path, not_ours: Collection[str], most: int) -> tuple[list[str], list[str]]:
    kept: list[str] = []
    left_out: list[str] = []

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or error.filename == str(root):  # else it has just gone
            raise error

    for folder, folders, files in os.walk(root, onerror=fail):
        here = os.path.relpath(folder, root)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        ours = [n for n in folders if n not in links and os.path.normpath(os.path.join(here, n)) not in not_ours]
        dropped = {name for name in ours if name in _CACHES or _is_environment(os.path.join(folder, name))}
        folders[:] = [name for name in ours if name not in dropped]
        found = [name for name in (*files, *links) if _is_file(os.path.join(folder, name))]
        dropped |= {name for name in found if name.endswith(_STALE) or _is_big(os.path.join(folder, name))}
        kept += [os.path.normpath(os.path.join(here, name)) for name in found if name not in dropped]
        left_out += [os.path.normpath(os.path.join(here, name)) for name in dropped]
        if len(kept) > most:
            raise ReleaseFilesError(f"{root} has more than {most} files")
    return kept, left_out


def _is_environment(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in _ENVIRONMENTS)


def _is_big(path: str) -> bool:
    try:
        return os.lstat(path).st_size > _BIG_BYTES
    except FileNotFoundError:
        return False  # it has just gone
