"""Reads a rank's last words from its output files."""

import logging
from pathlib import Path

from holdfast.core.terminal_sanitizer import strip_controls
from holdfast.linux.regular_files import move_aside, read_end
from holdfast.logs.secret_masking import last_bytes

_TAIL_BYTES = 512 << 10  # of each file: a cause may lie far before the end, behind what others shouted
_LINE_CHARS = 2000
_LINES = 10_000  # of each file: a progress bar may write one a byte
_OURS = "holdfast: "
_log = logging.getLogger("holdfast.agent")


def rank_folder(log_dir: str, generation: int, rank: int) -> Path:
    return Path(log_dir) / f"gen-{generation}" / f"rank-{rank}"


def make_rank_folder(where: Path) -> None:
    """Make a rank's log folder and its generation's, for this user alone: what ranks print may be secret. What is there
    and is no folder is moved aside."""
    for folder in (where.parent, where):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            _log.warning("%s is no folder: moved to %s", folder, move_aside(str(folder)))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def last_words(where: Path) -> tuple[str, ...]:
    """Return the last lines of stdout, then the last lines of stderr, where the cause usually stands."""
    return (*_read_tail(where / "stdout.log"), *_read_tail(where / "stderr.log"))


def last_line(where: Path) -> str:
    """Return the last line that the rank, not holdfast, printed to stdout or stderr; "" if there is none."""
    for path in sorted((where / "stdout.log", where / "stderr.log"), key=_written_at, reverse=True):
        for line in reversed(_read_tail(path)):
            if not line.startswith(_OURS):
                return line.strip()
    return ""


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_tail(path: Path) -> tuple[str, ...]:
    try:
        text = last_bytes(read_end(path, _TAIL_BYTES + 1), _TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ()
    lines = (line.rstrip()[:_LINE_CHARS] for line in strip_controls(text.replace("\r", "\n")).split("\n"))
    return tuple(line for line in lines if line)[-_LINES:]
