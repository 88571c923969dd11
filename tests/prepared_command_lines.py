"""Writes the command lines of all commands anew, as --help and completion read them.

python -m tests.prepared_command_lines
"""

import argparse
import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec

from holdfast.cli.command_dispatch import COMMANDS, import_command
from holdfast.cli.terminal.prepared_help import PREPARED
from holdfast.config import Settings


class Caught(Exception):
    """Carries the parser that a command has made."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def catch(parser: argparse.ArgumentParser, *_: object) -> None:
    raise Caught(parser)


def find_parser(command: str) -> argparse.ArgumentParser | str:
    """The parser that a command makes, or its help where it has none."""
    shown = io.StringIO()
    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", catch), contextlib.redirect_stdout(shown):
        try:
            import_command(command)(["--help"])
        except Caught as caught:
            return caught.parser
    return shown.getvalue().rstrip("\n")


def describe(parser: argparse.ArgumentParser) -> dict[str, Any]:
    heads = {key: getattr(parser, key) for key in ("prog", "usage", "description", "epilog")}
    return {key: text for key, text in heads.items() if text} | {"rows": list(rows_of(parser))}


def rows_of(parser: argparse.ArgumentParser) -> Iterator[dict[str, Any]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {choice.dest: choice.help for choice in action._choices_actions}
            shape = {"dest": action.dest, "required": action.required, "metavar": action.metavar}
            verbs = {
                verb: describe(below) | ({"help": said[verb]} if verb in said else {})
                for verb, below in action.choices.items()
            }
            yield {"verbs": verbs, "shape": {key: value for key, value in shape.items() if value is not None}}
        elif not isinstance(action, argparse._HelpAction):
            yield row_of(parser, action)


def row_of(parser: argparse.ArgumentParser, action: argparse.Action) -> dict[str, Any]:
    row: dict[str, Any] = {"names": action.option_strings or [action.dest]}
    row |= {"takes": action.nargs} if action.nargs is not None else {}
    row |= {"value": action.metavar} if action.metavar else {}
    row |= {"required": True} if action.required and action.option_strings else {}
    row |= {"choices": list(action.choices)} if action.choices else {}
    if action.choices and not action.metavar:
        row["value"] = "{" + ",".join(action.choices) + "}"
    if action.help is None:
        row["help"] = None
    elif action.help is not argparse.SUPPRESS:
        row["help"] = parser._get_formatter()._expand_help(action).replace("%", "%%")
    groups = [group.title for group in parser._action_groups[2:] if action in group._group_actions]
    row |= {"group": groups[0]} if groups else {}
    either = [n for n, group in enumerate(parser._mutually_exclusive_groups, 1) if action in group._group_actions]
    return row | ({"either": either[0]} if either else {})


def setting_names(settings: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(settings):
        below = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        yield from setting_names(field.type, f"{prefix}{field.name}.") if below else (f"{prefix}{field.name}",)


def render_lines() -> str:
    lines: dict[str, Any] = {}
    for command in COMMANDS:
        found = find_parser(command)
        lines[command] = {"text": found} if isinstance(found, str) else describe(found)
    lines[""] = {"settings": sorted(setting_names(Settings))}
    return json.dumps(lines, indent=0, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PREPARED.write_text(render_lines())
