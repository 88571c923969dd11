"""Follows the ranks' log files by offset. A reading takes a bounded number of bytes, whatever these bytes are."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from holdfast.agent.rank import last_words
from holdfast.agent.sources import Signal
from holdfast.linux.regular_files import open_file
from holdfast.model.observation import Line

_LINE_BYTES = 4096  # of one line; the rest of it is dropped
_END = re.compile(rb"[\r\n]+")
Running = Callable[[], Sequence[tuple[int, int]]]  # generation and rank of each
Key = tuple[int, int, str]
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")


class RankLogSource:
    """Follows the logs of running ranks. Ranks that already run at the start are followed from the end of their files,
    as an earlier agent has read the rest. One reading takes at most `limit_bytes` from all files together. New bytes of
    a file are split into lines only if `worth` says so, which is rare."""

    def __init__(
        self,
        clock: Callable[[], float],
        log_dir: str,
        running: Running,
        limit_bytes: int,
        worth: Callable[[bytes], bool],
    ) -> None:
        self.skipped_bytes = 0
        self._worth = worth
        self._clock = clock
        self._log_dir = log_dir
        self._running = running
        self._limit_bytes = limit_bytes
        self._files = {key: LogFollower(self._log_path(key), from_end=True) for key in self._file_keys()}

    def _file_keys(self) -> list[Key]:
        return [(generation, rank, name) for generation, rank in self._running() for name in ("stdout", "stderr")]

    def _log_path(self, key: Key) -> Path:
        return last_words.rank_folder(self._log_dir, key[0], key[1]) / f"{key[2]}.log"

    def read(self) -> list[Signal]:
        now = self._clock()
        self._files = {key: self._files.get(key) or LogFollower(self._log_path(key)) for key in self._file_keys()}
        limit_bytes = self._limit_bytes // max(1, len(self._files))
        found: list[Signal] = []
        for (generation, rank, _), file in self._files.items():
            text = file.read_new(limit_bytes)
            self.skipped_bytes += file.take_skipped()
            if text and self._worth(text):
                found += (Line(text=line, at=now, rank=rank, generation=generation) for line in file.split_lines(text))
            elif text:
                file.skip_piece(text)
        return found


class LogFollower:
    """Follows one file, which may be truncated when it has grown too long."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = 0
        self._torn = b""  # the beginning of a line that is not yet whole
        self._skipped = 0
        if from_end:
            self.read_new(0)
            self._skipped = 0

    def read_new(self, limit_bytes: int) -> bytes:
        """Return the bytes added since the last call, or only the newest `limit_bytes` if there are more."""
        try:
            size = os.stat(self.path).st_size
            if size < self._offset:
                self._offset, self._torn = 0, b""
            if size == self._offset:
                return b""
            start = max(self._offset, size - limit_bytes)
            with open_file(self.path) as file:
                file.seek(start)
                text = file.read(size - start)
        except OSError:
            return b""  # not there yet, or no regular file
        if start > self._offset:
            self._skipped += start - self._offset
            self._torn = b""
        self._offset = start + len(text)
        return self._torn + text

    def take_skipped(self) -> int:
        skipped, self._skipped = self._skipped, 0
        return skipped

    def split_lines(self, text: bytes) -> Iterator[str]:
        *whole, torn = _END.split(text)
        self._torn = torn[:_LINE_BYTES]
        for line in whole:
            if line:
                yield _ANSI.sub(b"", line[:_LINE_BYTES]).decode("utf-8", "replace")

    def skip_piece(self, text: bytes) -> None:
        """Skip these bytes, but keep the unfinished line at their end."""
        self._torn = text[max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 :][:_LINE_BYTES]
