"""Keeps the log files of running ranks below their size limit."""

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.agent.rank import last_words
from holdfast.linux.regular_files import open_file
from holdfast.wire.holder_messages import HolderRank, RankKey
from holdfast.wire.run_and_node_specs import NodeSpec

_CHUNK = 1 << 20
_LOOK_S = 1.0  # how often their sizes are looked at
_log = logging.getLogger("holdfast.agent")


class LogRotation:
    def __init__(self, node: NodeSpec) -> None:
        self._node = node
        self._flooded: set[RankKey] = set()

    async def run(self, ranks: Callable[[], Iterable[HolderRank]]) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            # In a thread: a slow disk must not keep us from speaking.
            await asyncio.to_thread(self.rotate_logs, [held.rank_key for held in ranks()])

    def rotate_logs(self, keys: list[RankKey]) -> None:
        for key in keys:
            where = last_words.rank_folder(self._node.log_dir, key.generation, key.rank)
            limit_bytes = self._node.settings.logs.file_bytes
            rotated = [rotate_file(where / name, limit_bytes) for name in ("stdout.log", "stderr.log")]
            if any(rotated) and key not in self._flooded:
                self._flooded.add(key)
                _log.warning("rank %d writes more than logs.file_bytes; its older output is dropped", key.rank)


def rotate_file(path: Path, limit_bytes: int) -> bool:
    """If a file has outgrown `limit_bytes`, copy its end to PATH.1 and empty the file; return whether this was done.

    Ranks hold the file open for appending, so it cannot be renamed. What they write during the copy is lost.
    """
    try:
        found = path.lstat()
        if found.st_size <= limit_bytes or not stat.S_ISREG(found.st_mode):
            return False
        _keep_end(path, found.st_size - limit_bytes, limit_bytes)
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _keep_end(path: Path, start: int, count: int) -> None:
    """Copy `count` bytes, from offset `start`, to PATH.1. The file may grow meanwhile, so the count is fixed."""
    older = path.with_name(f"{path.name}.1")
    try:
        older.unlink(missing_ok=True)  # never into what a rank may have put there, such as a pipe
        with open_file(path) as source, open(older, "xb", opener=_open_private) as kept:
            source.seek(start)
            while count and (chunk := source.read(min(count, _CHUNK))):
                kept.write(chunk)
                count -= len(chunk)
    except OSError:
        older.unlink(missing_ok=True)  # no room for both; then better the new than the old
