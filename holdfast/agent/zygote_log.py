"""The zygote's log: what modules print while they are imported, masked line by line, in a file of bounded size."""

import contextlib
import os
import select
from collections.abc import Mapping
from pathlib import Path

from holdfast.linux.regular_files import open_log
from holdfast.logs.secret_masking import Masker, env_secrets, make_secret_masker, trim_line

_READ_BYTES = 1 << 16
_LINE_BYTES = 1 << 14  # of a line; the rest is left out
_MOST_BYTES = 4 << 20
_FULL = b"holdfast: the log is full, what follows is left out\n"


class ZygoteLog:
    """A pipe that the holder reads. The zygote writes to its other end, and may import anybody's code."""

    def __init__(self, path: Path, env: Mapping[str, str]) -> None:
        """Open the log; `env` is the zygote's environment, whose secrets are masked besides our own."""
        self._pipe, self.far_end = os.pipe()
        os.set_blocking(self._pipe, False)
        self._log = open_log(str(path))
        self._size = os.fstat(self._log).st_size
        self._env = env
        self._mask: Masker | None = None  # made for the first line: most zygotes print nothing
        self._torn = b""
        self._skips = False  # the rest of a line that is too long

    def fileno(self) -> int:
        return self._pipe

    def close(self) -> None:
        os.close(self._pipe)
        os.close(self._log)

    def copy_lines(self) -> bool:
        """Copy the next lines that have come. Return False if no more can come."""
        try:
            piece = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return True
        *lines, torn = (self._torn + piece).split(b"\n")
        if self._skips and lines:
            del lines[0]
            self._skips = False
        if not piece or len(torn) > _LINE_BYTES:
            lines += [torn] if torn and not self._skips else []
            self._skips, torn = bool(piece), b""
        self._torn = torn
        self._write_lines(lines)
        return bool(piece)

    def copy_rest(self) -> None:
        """Copy what has come already, and wait for nothing."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while poll.poll(0) and self.copy_lines():
            pass

    def _write_lines(self, lines: list[bytes]) -> None:
        if not lines or self._size > _MOST_BYTES:
            return
        self._mask = self._mask or make_secret_masker(env_secrets(self._env))
        shown = self._mask.mask_lines(trim_line(line.decode("utf-8", "replace")) for line in lines)
        text = "".join(f"{line}\n" for line in shown).encode()
        self._size += len(text)
        with contextlib.suppress(OSError):  # a full disk must not end the node
            os.write(self._log, text if self._size <= _MOST_BYTES else text + _FULL)
