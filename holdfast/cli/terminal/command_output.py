"""The console on which commands print tables and sentences for people, and for the programs that they pipe them to."""

import os
import sys

from rich.console import Console

_WIDE = 1000  # columns: a program that searches for words needs each sentence on one line


class CommandOutput(Console):
    def on_broken_pipe(self) -> None:
        """Let the command end as every other does of whose output nobody reads the rest."""
        raise BrokenPipeError


def make_output() -> Console:
    """Return a console on standard output: as wide as the terminal, or for a file or a pipe as its lines are."""
    wide = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return CommandOutput(markup=False, highlight=False, width=_WIDE if wide else None)
