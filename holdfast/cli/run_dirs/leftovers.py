"""Finds and removes the leftovers of a dead run on this host and on storage; a lock proves that the run is dead."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.checkpoint import retention, stored_checkpoints
from holdfast.checkpoint.manifest import step_of
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.storage_opener import open_storage
from holdfast.cli.run_dirs import run_dir_secrets, run_directory, run_liveness
from holdfast.cli.run_dirs.run_dir_removal import remove_below
from holdfast.cli.terminal.quantity_text import counted_noun
from holdfast.fleet.local_process_fleet import MARK, end_node, node_processes
from holdfast.wire import folder_use_lock, run_and_node_specs
from holdfast.wire.rank_keeper_messages import ArenaRequest
from holdfast.wire.run_and_node_specs import COMPILED_ARCHIVES, RunSpec

_DRAFT = re.compile(r"\..+\.\d+")  # a file that was being written, and by whom
_WANTS = "want-*.json"  # in the folders of nodes
# Why it is gone, and what its processes would be known by. A run that is resumed gives no name twice.
_NODE_KEPT = ("left", "released", "mark", folder_use_lock.NAME)


class Leftover(msgspec.Struct, frozen=True):
    """One process, file, folder or unfinished checkpoint that nobody will use again."""

    kind: str  # "file", "folder", "process", "write": an unfinished checkpoint
    name: str  # its path, pid or URL
    bytes: int  # on disk or, for a process, in memory


class Kept(msgspec.Struct, frozen=True):
    """Something that a run leaves on purpose, such as its journal or its checkpoints, and why it is not removed."""

    what: str
    bytes: int
    why: str


class RunLeftovers(msgspec.Struct, frozen=True, kw_only=True):
    """What a run left behind, what of it is kept, and whether it is alive. Only a dead run's leftovers are removed."""

    run: str
    state: str  # "alive", "dead", "unknown"
    why: str
    left: tuple[Leftover, ...] = ()
    kept: tuple[Kept, ...] = ()
    failed: tuple[str, ...] = ()  # one sentence each: what could not be looked at or removed

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.left)


def clean_run(run_dir: Path, *, dry_run: bool) -> RunLeftovers:
    """Find what is left of a run and, unless `dry_run`, remove it while locks keep new processes out."""
    with contextlib.ExitStack() as locks:
        try:
            alive = _alive_reason(run_dir, locks)
        except folder_use_lock.LockError as e:
            return RunLeftovers(run=str(run_dir), state="unknown", why=f"the run {e}")
        if alive:
            return RunLeftovers(run=str(run_dir), state="alive", why=alive)
        found = _find_leftovers(run_dir)
        return found if dry_run else _remove_leftovers(run_dir, found)


def _node_folders(run_dir: Path) -> list[Path]:
    folder = run_dir / "nodes"
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def _alive_reason(run_dir: Path, locks: contextlib.ExitStack) -> str:
    """Return in words which process of a run is alive. If none is, return "" and put all locks into `locks`."""
    if os.path.realpath(os.environ.get(MARK, "/")).startswith(os.path.realpath(run_dir) + "/"):
        return "this command was started by one of its ranks"
    if not _take_lock(run_dir, locks):
        return "holdfast run, its controller or its store is running"
    for node in _node_folders(run_dir):
        if (node / folder_use_lock.NAME).exists() and not _take_lock(node, locks):
            return f"node {node.name} is running"
    return ""


def _take_lock(folder: Path, locks: contextlib.ExitStack) -> bool:
    fd = folder_use_lock.lock_exclusively(folder)
    if fd is not None:
        locks.callback(os.close, fd)
    return fd is not None


def _find_leftovers(run_dir: Path) -> RunLeftovers:
    run = run_directory.read_spec(run_dir)
    ending = _ending_text(run_dir)
    processes = [_process_leftover(pid) for node in _node_folders(run_dir) for pid in node_processes(node)]
    failed: list[str] = []
    writes: list[Leftover] = []
    urls = sorted(set(_checkpoint_urls(run_dir)))
    for url in urls:
        try:
            abandoned = retention.find_abandoned(url, run.job.run_id)
            writes += [Leftover("write", one.url, one.bytes) for one in abandoned]
        except StorageError as e:
            failed.append(str(e))
    files = [Leftover("file", str(path), path.lstat().st_size) for path in _removable_files(run_dir, bool(ending))]
    folders = [
        Leftover("folder", str(path), _size(path)) for path in run_dir_secrets.find_resume_folders(run_dir) if ending
    ]
    return RunLeftovers(
        run=str(run_dir),
        state="dead",
        why=ending or f"was killed; holdfast run --resume {run_dir} continues it",
        left=(*processes, *writes, *folders, *files),
        kept=(*_kept_items(run_dir, Path(run.log_dir), bool(ending), urls), *_kept_states(run, bool(ending), urls)),
        failed=tuple(failed),
    )


def _ending_text(run_dir: Path) -> str:
    """Say how a run ended; "" if it could be resumed."""
    if (run_dir / "exit.json").exists():
        return run_liveness.ending_text(run_dir)
    if run_liveness.is_joined_node(run_dir):
        return "was a node of a job whose controller is elsewhere"
    return ""


def _removable_files(run_dir: Path, ended: bool) -> Iterator[Path]:
    names = {
        "store.sock",
        "fork.sock",
        "controller.json",
        "imports.json",
        *(run_dir_secrets.SECRET_FILES if ended else ()),
    }
    for path in sorted(run_dir.iterdir()):
        if path.name in names or _DRAFT.fullmatch(path.name):
            yield path
    for node in _node_folders(run_dir):
        for path in sorted(node.iterdir()):
            if path.suffix != ".log" and path.name not in _NODE_KEPT and not path.is_dir():
                yield path


def _checkpoint_urls(run_dir: Path) -> Iterator[str]:
    """Yield the URLs to which the run's ranks wrote checkpoints."""
    for path in (path for node in _node_folders(run_dir) for path in node.glob(_WANTS)):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            want = run_and_node_specs.read_json(path, ArenaRequest)
            if want.storage:
                yield want.storage.url


def _kept_states(run: RunSpec, ended: bool, urls: list[str]) -> Iterator[Kept]:
    """Yield the states that the run left on this host's disk, with the reason to keep them."""
    folder = Path(run.settings.disk.run_folder(run.job.marked_id))
    if run.settings.disk.path and folder.exists():
        why = _lasting_reason(run, folder, urls) if ended else "holdfast run --resume goes on from them"
        yield Kept(f"states on disk in {folder}", _size(folder), why)


def _lasting_reason(run: RunSpec, folder: Path, urls: list[str]) -> str:
    """Return why states of an ended run stay on disk: storage may lack them, or a node that was away left them."""
    newest = max((step for at in folder.glob("*/*") if (step := step_of(at.name)) is not None), default=-1)
    if newest < 0:
        return "no state in it is whole"
    try:
        found = [one for url in urls for one in stored_checkpoints.find_checkpoints(url)]
    except StorageError:
        return "storage cannot be read, so nobody knows whether it has them"
    stored = max((one.step for one in found if one.ok and one.author.run == run.job.marked_id), default=-1)
    if newest > stored:
        return "no storage is known to have them"
    return f"a node that was away at the end has left them; storage has step {stored}"


def _kept_items(run_dir: Path, log_dir: Path, ended: bool, urls: list[str]) -> Iterator[Kept]:
    yield Kept("the journal", sum(_size(path) for path in run_dir.glob("journal.*")), "holdfast report reads it")
    yield Kept("the logs", _size(log_dir), "holdfast logs and holdfast diagnose read them")
    compiled = _size(run_dir / "releases" / COMPILED_ARCHIVES)
    if copies := _size(run_dir / "releases") - compiled:
        yield Kept("copies of your code", copies, "they are what the ranks ran")
    if not ended:
        notes = sum(_size(run_dir / name) for name in ("run.json", *run_dir_secrets.SECRET_FILES))
        yield Kept("the command line and the environment", notes, "holdfast run --resume needs them")
        for folder in run_dir_secrets.find_resume_folders(run_dir):
            yield Kept(str(folder.relative_to(run_dir)), _size(folder), "holdfast run --resume uses it")
    with contextlib.suppress(StorageError):
        for url in urls:
            if found := stored_checkpoints.find_checkpoints(url):
                total = sum(one.bytes for one in found)
                yield Kept(f"{counted_noun(len(found), 'checkpoint')} in {url}", total, "training goes on from them")


def _size(place: Path) -> int:
    """Return the size of a file or of all files below a folder; 0 if it does not exist."""
    files = [place] if place.is_file() else [p for p in place.rglob("*") if p.is_file() and not p.is_symlink()]
    total = 0
    for path in files:
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def _process_leftover(pid: int) -> Leftover:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        pages = 0  # it has just ended
    return Leftover("process", str(pid), pages * os.sysconf("SC_PAGE_SIZE"))


def _remove_leftovers(run_dir: Path, found: RunLeftovers) -> RunLeftovers:
    failed = [*found.failed]
    for node in _node_folders(run_dir) if any(one.kind == "process" for one in found.left) else ():
        try:
            end_node(node)
        except OSError as e:
            failed.append(str(e))
    for one in found.left:
        try:
            if one.kind == "file" and failed and Path(one.name).match(_WANTS):
                continue  # by these the next try finds the storage
            if one.kind in ("file", "folder"):
                remove_below(run_dir, Path(one.name))
            elif one.kind == "write":
                base, _, name = one.name.rpartition("/")
                open_storage(base).remove_folder(name)
        except (OSError, StorageError) as e:
            failed.append(f"{one.name} cannot be removed: {e}" if isinstance(e, OSError) else str(e))
    return msgspec.structs.replace(found, failed=tuple(failed))
