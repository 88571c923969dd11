"""The help and the flags of all commands, prepared in advance, so that --help and completion import no command.

`python -m tests.prepared_command_lines` writes them anew from the commands' own parsers."""

import argparse
import json
from pathlib import Path
from typing import Any, NoReturn

PREPARED = Path(__file__).parents[1] / "command_lines.json"
CommandLine = dict[str, Any]  # one parser: prog, usage, description, epilog, rows


class _NoHelpError(Exception):
    """These arguments do not ask for a help text."""


class _HelpParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _NoHelpError(message)


def load_command_lines() -> dict[str, CommandLine]:
    found: dict[str, CommandLine] = json.loads(PREPARED.read_bytes())
    return found


def print_help(command: str, words: list[str]) -> bool:
    """Print the help that these arguments ask for. Return False if they ask for none or contain an error."""
    line = load_command_lines().get(command, {"text": ""})
    if "text" in line:
        asked = bool(line["text"]) and words[0] in ("-h", "--help")
        print(line["text"]) if asked else None
        return asked
    parser = _HelpParser(**_heads(line))
    _add_rows(parser, line)
    try:
        parser.parse_known_args(words)
    except _NoHelpError:
        return False
    except SystemExit:  # argparse has printed it
        return True
    return False


def _heads(line: CommandLine) -> dict[str, Any]:
    return {key: line.get(key) for key in ("prog", "usage", "description", "epilog")}


def _add_rows(parser: argparse.ArgumentParser, line: CommandLine) -> None:
    """Give a parser the same help texts as the command's own parser, and the same number of values for each flag."""
    groups: dict[str, Any] = {}
    either: dict[int, Any] = {}
    for row in line["rows"]:
        if "verbs" in row:
            verbs = parser.add_subparsers(**row["shape"])
            for verb, below in row["verbs"].items():
                listed = {"help": below["help"]} if "help" in below else {}
                _add_rows(verbs.add_parser(verb, **_heads(below), **listed), below)
            continue
        place: Any = parser
        if title := row.get("group"):
            place = groups[title] = groups.get(title) or parser.add_argument_group(title)
        if number := row.get("either"):
            place = either[number] = either.get(number) or place.add_mutually_exclusive_group()
        place.add_argument(*row["names"], **_argument_shape(row))


def _argument_shape(row: dict[str, Any]) -> dict[str, Any]:
    shape: dict[str, Any] = {"help": row.get("help", argparse.SUPPRESS)}
    if row.get("takes") == 0:
        return shape | {"action": "store_true"}
    names = (("nargs", "takes"), ("metavar", "value"), ("required", "required"))
    return shape | {name: row[key] for name, key in names if key in row}
