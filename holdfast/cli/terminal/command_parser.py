"""The argument parser of all commands but `run`: argparse with one-sentence errors."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

USAGE = 2  # the exit code of a command line that cannot be read


class CommandParser(argparse.ArgumentParser):
    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        found: argparse.Namespace
        found, unread = self.parse_known_args(args, namespace)
        if unread:
            self._chosen(found)._refuse(unread[0])
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _refuse(self, word: str) -> NoReturn:
        written = word.partition("=")[0]
        flags = [flag for action in self._actions for flag in action.option_strings]
        if not written.startswith("-"):
            self.error(f"unexpected argument {written}")
        if near := difflib.get_close_matches(written.replace("_", "-"), flags, n=1):
            self.exit(USAGE, f"{self.prog}: there is no flag {written}; did you mean {near[0]}?\n")
        self.error(f"there is no flag {written}")

    def _chosen(self, found: argparse.Namespace) -> "CommandParser":
        """Return the parser of the chosen subcommand; this parser if it has no subcommands."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                below: CommandParser = action.choices[getattr(found, action.dest)]
                return below._chosen(found)
        return self
