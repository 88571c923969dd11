"""--help and completion are quick because they import no command, and say what the command itself would."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.cli import main
from holdfast.cli.command_dispatch import COMMANDS
from holdfast.cli.terminal.prepared_help import PREPARED, print_help
from tests.conftest import job_environment
from tests.prepared_command_lines import find_parser, render_lines

# Each of these takes longer to import than all that a help text needs.
SLOW = ("aiohttp", "asyncio", "cryptography", "fsspec", "msgspec", "numpy", "prometheus_client", "rich", "torch")
ALL_HELP = """
import contextlib, io, sys
from holdfast.cli import main
from holdfast.cli.command_dispatch import COMMANDS
with contextlib.redirect_stdout(io.StringIO()) as shown:
    for command in COMMANDS:
        assert main([command, "--help"]) == 0, command
    for words in (["repo"], ["report", "--j"], ["report", ""], ["run", "--set", ""], ["ckpt", ""]):
        assert main(["completion", "words", "--", *words]) == 0
assert shown.getvalue().count("usage:") == len(COMMANDS)
print(*sys.modules)
"""


def test_the_prepared_lines_are_those_of_the_commands() -> None:
    assert PREPARED.read_text() == render_lines(), "a flag has changed: python -m tests.prepared_command_lines"


def parsers(parser: argparse.ArgumentParser, *words: str) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, below in action.choices.items():
                yield from parsers(below, *words, verb)


@pytest.mark.parametrize("columns", [60, 120])
def test_the_help_is_the_one_of_the_command(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in COMMANDS:
        found = find_parser(command)
        own = [((), found)] if isinstance(found, str) else parsers(found)
        for words, parser in own:
            assert main([command, *words, "--help"]) == 0
            text = parser if isinstance(parser, str) else parser.format_help()
            assert capsys.readouterr().out.rstrip("\n") == text.rstrip("\n"), (command, *words)


def test_help_of_the_script_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert not print_help("run", ["--nnodes", "2", "train.py", "--help"])
    assert not print_help("ckpt", ["lss", "--help"]), "the command says what is wrong"
    assert not print_help("sbatch", ["train.py", "--help"])
    assert capsys.readouterr().out == ""
    assert print_help("run", ["--nnodes", "2", "--help"])


def test_help_and_completion_import_nothing_slow() -> None:
    argv = [sys.executable, "-c", ALL_HELP]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60, env=job_environment())
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert [name for name in loaded if name.partition(".")[0] in SLOW] == []
    commands = [name for name in loaded if name.startswith("holdfast.cli.commands.")]
    assert commands == ["holdfast.cli.commands.completion_command"]
    assert "COLUMNS" not in os.environ
