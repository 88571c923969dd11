"""Brings files from a staged tree to the user's tree while ranks run, so that the files outlive the machine."""

import asyncio
import contextlib
import errno
import fcntl
import glob
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from holdfast.agent.agent_clock import AgentClock
from holdfast.wire.releases import release_tree_sync
from holdfast.wire.releases.release_file_selection import is_stale
from holdfast.wire.releases.release_tree_sync import GatheredFiles, TreeIndex
from holdfast.wire.releases.staged_release import is_within

LOOK_S = 3.0
_SETTLED_S = 2.0  # what has not changed for so long is whole, if nobody has it open for writing
_RESTLESS_S = 10.0  # what is replaced again and again never settles: after so long the one that is there is brought
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)  # another disk, or one without hard links

Look = tuple[int, int, int]  # size, time of writing, inode


class FileAtHome(msgspec.Struct, frozen=True):
    """A file brought to the path `to` in the user's tree. `ours` is its look in the staged tree, `theirs` its look at
    `to`."""

    ours: Look
    to: str
    theirs: Look


class OutputReturn:
    """Brings files from one staged tree at a time to the user's tree, by hard link, or by copy where links fail.

    Files in the staged tree stay there, because ranks may use them. If a rank replaces its file, the new file is
    brought as well. If a rank removes its file, the file is removed from the user's tree as well.
    """

    def __init__(self, folder: Path, clock: AgentClock) -> None:
        self._folder = folder
        self._clock = clock
        self._at = folder
        self._index: TreeIndex | None = None
        self._seen: dict[str, tuple[float, Look]] = {}  # since when each file looks so
        self._waits: dict[str, float] = {}  # since when it is to be brought
        self._gone: dict[str, float] = {}  # since when
        self._brought: dict[str, FileAtHome] = {}
        self._busy: set[str] = set()
        self._told: set[str] = set()
        self._lock: BinaryIO | None = None
        self._turn = asyncio.Lock()

    async def run(self, copy: Callable[[], Path | None], say: Callable[[str], None]) -> None:
        """Until this is cancelled, bring files from the staged tree that `copy` returns. If several nodes share the
        tree, only one node's agent does this."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                async with self._turn:
                    text = await asyncio.to_thread(self._look_once, copy())
                if text:
                    say(text)
            except OSError as e:
                if str(e) not in self._told:
                    self._told.add(str(e))
                    say(f"files that ranks write beside the script stay in {self._at}: {e}")

    def _look_once(self, at: Path | None) -> str:
        if at is None or not self._is_mine():
            self._give_up()
            return ""
        first = not self._brought
        index, gathered = self.look_at(at, self._clock.monotonic())
        if index is None:
            return ""
        news = tuple(text for text in (*gathered.stuck, *gathered.both) if text not in self._told)
        self._told.update(news)
        if not news and not (first and gathered.moved):
            return ""  # checkpoint after checkpoint: said once
        return release_tree_sync.describe_gathered(index, gathered)

    def _is_mine(self) -> bool:
        if self._lock is None:
            file = (self._folder / ".homing").open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            except OSError:
                pass  # a file system without locks: whatever is done twice is done alike
            self._lock = file
        return True

    def _give_up(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- one look ----------------------------------------------------------------------------------------------

    def look_at(self, at: Path, now: float) -> tuple[TreeIndex | None, GatheredFiles]:
        """Bring files that have stopped changing, and removals. Return the tree's TreeIndex and what was brought."""
        index = self._index_of(at)
        if index is None or not at.is_dir() or not os.path.isdir(index.home):
            return None, GatheredFiles()
        made = dict(_made_files(at, "", index))
        before, self._seen = self._seen, {p: (self._unchanged_since(p, found, now), found) for p, found in made.items()}
        wanted = [p for p, found in made.items() if not self._is_home(p, found)]
        self._waits = {p: self._waits.get(p, now) for p in wanted}
        due: dict[str, Look | None] = {p: made[p] for p in wanted if now - self._seen[p][0] >= _SETTLED_S}
        for path in wanted:
            if now - self._waits[path] >= _RESTLESS_S and _is_replaced(before.get(path), made[path]):
                due.setdefault(path, None)
        gathered = self._bring_all(sorted(due.items(), key=lambda item: made[item[0]][1]), index)
        self._withdraw_removed(made, index, now)
        return index, gathered

    def _bring_all(self, due: list[tuple[str, Look | None]], index: TreeIndex) -> GatheredFiles:
        moved: list[str] = []
        both: list[str] = []
        stuck: list[str] = []
        self._busy = files_being_written(str(self._at)) if due else set()
        for path, expected in due:
            try:
                with release_tree_sync.lock_trees(self._folder):
                    to = self._bring_file(path, expected, index)
            except FileNotFoundError:
                continue  # a rank has removed it meanwhile, or writes to it
            except OSError as e:
                stuck.append(f"{path} stays in {self._at}: {e.strerror}")
                continue
            moved.extend(to)
            both.extend(name for name in to if name != path)
        return GatheredFiles(moved=tuple(moved), both=tuple(both), stuck=tuple(stuck))

    def _is_home(self, path: str, found: Look) -> bool:
        return path in self._brought and self._brought[path].ours == found

    def _index_of(self, at: Path) -> TreeIndex | None:
        if at != self._at or self._index is None:
            self._at, self._index = at, release_tree_sync.read_index(at)
            self._seen, self._waits, self._gone, self._brought = {}, {}, {}, {}
        return self._index

    def _unchanged_since(self, path: str, found: Look, now: float) -> float:
        since, before = self._seen.get(path, (now, found))
        return since if before == found else now

    def _bring_file(self, path: str, expected: Look | None, index: TreeIndex) -> tuple[str, ...]:
        """Bring one file. Return a tuple of its new path in the user's tree; empty if the file was already there."""
        ours, theirs = self._at / path, Path(index.home, path)
        to, moved = theirs, False
        found = _look_of(os.lstat(ours))
        if not release_tree_sync.same(ours, theirs):
            theirs.parent.mkdir(parents=True, exist_ok=True)
            to, moved = self._destination(path, theirs), True
            try:
                found = self._link_home(ours, to, expected)
            except OSError as e:
                if e.errno not in _NO_LINKS:
                    raise
                self._check_unchanged(ours, found, expected)
                release_tree_sync.copy(ours, to)
        self._waits.pop(path, None)
        self._brought[path] = FileAtHome(found, str(to), _look_of(os.lstat(to)))
        return (os.path.join(os.path.dirname(path), to.name),) if moved else ()

    def _destination(self, path: str, theirs: Path) -> Path:
        """Return the path in the user's tree to bring a rank's file to. It is `theirs` if the file there is an earlier
        copy that we brought and nobody has changed. Otherwise `release_tree_sync` decides by file times whether to
        keep both files."""
        known = self._brought.get(path)
        if known and known.to == str(theirs) and (there := _stat(theirs)) and _look_of(there) == known.theirs:
            return theirs
        return release_tree_sync.destination(self._at / path, theirs, self._at.name)

    def _link_home(self, ours: Path, to: Path, expected: Look | None) -> Look:
        """Hard-link a file to `to`, atomically replacing what is there; return the file's size, time and inode."""
        draft = to.with_name(f".{to.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        os.link(ours, draft, follow_symlinks=False)
        try:
            found = _look_of(os.lstat(draft))
            self._check_unchanged(ours, found, expected)
            os.replace(draft, to)
        finally:
            draft.unlink(missing_ok=True)
        return found

    def _check_unchanged(self, ours: Path, found: Look, expected: Look | None) -> None:
        """Raise FileNotFoundError if a process writes to the file, or if its size, time or inode is not `expected`."""
        busy = self._busy if expected else files_being_written(str(self._at))
        place = os.path.join(os.path.realpath(ours.parent), ours.name)
        if place in busy or (expected and found != expected):
            raise FileNotFoundError(ours)

    def _withdraw_removed(self, made: dict[str, Look], index: TreeIndex, now: float) -> None:
        """Remove from the user's tree what a script has removed, such as old checkpoints.

        A file stays if somebody has changed it since we brought it, or if the script has only renamed its own file.
        Nothing is removed if a file of the release itself is missing: somebody may be deleting the staged tree.
        """
        self._gone = {path: self._gone.get(path, now) for path in self._brought if path not in made}
        renamed = {found[2] for path, found in made.items() if not self._is_home(path, found)}
        long = [path for path, since in self._gone.items() if now - since >= _SETTLED_S]
        long = [path for path in long if self._brought[path].ours[2] not in renamed]
        if not long or not all(os.path.lexists(self._at / path) for path in index.files):
            return
        with release_tree_sync.lock_trees(self._folder):
            for path in long:
                self._remove(path)

    def _remove(self, path: str) -> None:
        brought = self._brought.pop(path)
        if os.path.lexists(self._at / path):
            return  # it is a link to what is at home by now
        with contextlib.suppress(FileNotFoundError):
            if _look_of(os.lstat(brought.to)) == brought.theirs:
                os.unlink(brought.to)

    async def close(self) -> None:
        """At the end, remove from the user's tree what ranks have removed. Do nothing while a file is being copied."""
        if not self._turn.locked():  # a large file is on its way to another disk: nobody waits for that
            async with self._turn:
                await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._index is not None and all(os.path.lexists(self._at / path) for path in self._index.files):
            with release_tree_sync.lock_trees(self._folder):
                for path in [*self._brought]:
                    self._remove(path)
        self._index = None


def _is_replaced(before: tuple[float, Look] | None, now: Look) -> bool:
    """Return whether another file was renamed to this name; a script does that once the file is complete."""
    return before is not None and before[1][2] != now[2]


def _made_files(folder: Path, path: str, index: TreeIndex) -> Iterator[tuple[str, Look]]:
    """Yield files and links of the staged tree that are neither part of the release nor links that we made."""
    for name in _list_names(folder):
        below, whole = os.path.join(path, name), folder / name
        if below in index.files or is_stale(name) or (found := _stat(whole)) is None:
            continue
        if stat.S_ISDIR(found.st_mode):
            yield from _made_files(whole, below, index)
        elif stat.S_ISREG(found.st_mode) or (
            stat.S_ISLNK(found.st_mode) and not release_tree_sync.leads_home(whole, index)
        ):
            yield below, _look_of(found)


def _list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []  # a rank has removed it meanwhile


def _stat(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _look_of(found: os.stat_result) -> Look:
    return found.st_size, found.st_mtime_ns, found.st_ino


def files_being_written(folder: str) -> set[str]:
    """Return files below a folder that a process of this host has open for writing, if we may inspect the process."""
    top = os.path.realpath(folder)
    return {
        to
        for fd in glob.iglob("/proc/[0-9]*/fd/*")
        if (to := _leads_to(fd)) and is_within(to, top) and _is_for_writing(fd)
    }


def _leads_to(fd: str) -> str:
    try:
        return os.readlink(fd)
    except OSError:
        return ""


def _is_for_writing(fd: str) -> bool:
    try:
        text = Path(fd.replace("/fd/", "/fdinfo/")).read_text()
    except OSError:
        return False
    flags = next((line.split()[1] for line in text.splitlines() if line.startswith("flags:")), "0")
    return bool(int(flags, 8) & os.O_ACCMODE)
