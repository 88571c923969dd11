"""A run that has not begun: if it is stopped, or refused, what was made for it is removed."""

import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from holdfast.cli.terminal.rank_console import say

_STOPS = (signal.SIGINT, signal.SIGTERM)


class MadeFolders:
    """The folders of a run that was not begun. Those that were there before stay, without what is in them now."""

    def __init__(self) -> None:
        self._folders: list[tuple[Path, bool]] = []

    def add_folder(self, folder: Path, *, kept: bool = False) -> None:
        self._folders.append((folder, kept))

    def remove_all(self) -> None:
        for folder, kept in reversed(self._folders):
            for inner in list(folder.iterdir()) if kept and folder.is_dir() else [folder]:
                if inner.is_dir() and not inner.is_symlink():
                    shutil.rmtree(inner, ignore_errors=True)
                else:
                    inner.unlink(missing_ok=True)


@contextlib.contextmanager
def removed_unless_begun() -> Iterator[MadeFolders]:
    """In this block, a stop signal ends the run, which has not begun, by SystemExit. However the block fails, the
    folders that were added to what it gets are removed. If it does not fail, the signals are the supervisor's."""
    made, begun = MadeFolders(), False
    stopped: list[int] = []
    before = {number: signal.signal(number, lambda number, _: _leave(number, stopped)) for number in _STOPS}
    try:
        yield made
        begun = True
    finally:
        if not begun:
            for number in _STOPS:
                signal.signal(number, signal.SIG_IGN)
            obey_signals()
            made.remove_all()
            if stopped:
                say("stopped before the job had begun; nothing of it is left")
            for number, obeyed in before.items():
                signal.signal(number, obeyed)


def hold_signals() -> None:
    """Let stop signals wait, as others learn of the run now, and only its supervisor can end it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def obey_signals() -> None:
    """Let stop signals through that have waited, now that somebody handles them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def _leave(number: int, stopped: list[int]) -> NoReturn:
    stopped.append(number)
    raise SystemExit(128 + number)
