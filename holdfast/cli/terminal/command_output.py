"""The console on which commands print tables and sentences, for people and for pipes."""

import os
import sys

from rich.console import Console

_UNKNOWN = 80  # columns of a table that nobody sees on a terminal
_WIDE = 1000  # columns: a program that searches for words needs each sentence on one line


class CommandOutput(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError. Otherwise rich would end the command in its own way when nobody reads the output."""
        raise BrokenPipeError


def table_width(console: Console) -> int:
    """Return the width to which tables fold their cells: the terminal's, or 80 columns without one."""
    return console.width if console.width < _WIDE else _UNKNOWN


def make_output() -> Console:
    """Return a console on standard output: as wide as the terminal; into a file or a pipe, lines are not wrapped."""
    wide = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return CommandOutput(markup=False, highlight=False, width=_WIDE if wide else None)
