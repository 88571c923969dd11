"""Standard output for commands that must finish, and return their exit code, even if nobody reads their output."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class ClosedPipeOutput:
    """Standard output that discards what is written once its reader is gone."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        with _without_reader(self._out):
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        with _without_reader(self._out):
            self._out.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


@contextlib.contextmanager
def _without_reader(out: TextIO) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        drop_output(out)


def drop_output(out: TextIO) -> None:
    """Discard everything that is written from now on, and what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def ignore_closed_pipe() -> contextlib.redirect_stdout[TextIO]:
    """Return a context in which printing goes on without an error after the reader of standard output is gone."""
    return contextlib.redirect_stdout(cast(TextIO, ClosedPipeOutput(sys.stdout)))
