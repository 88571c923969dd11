"""Our own programs import nothing from the working directory, in which other users may be able to write."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Where the words are those of a rank, which the user starts as `python -m` does, or are only shown.
RANKS = (
    "holdfast/cli/commands/ls_command.py",
    "holdfast/client/boot/executed_rank.py",
    "holdfast/client/boot/forked_rank.py",
    "holdfast/client/boot/script_runner.py",
    "holdfast/linux/preimported_fork.py",
    "holdfast/wire/run_and_node_specs.py",
)


def unsafe_starts(text: str) -> list[int]:
    """Lines of command lines with `-m` that do not keep the working directory out of the imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        words = node.args if isinstance(node, ast.Call) else getattr(node, "elts", ())
        for index, word in enumerate(words):
            if not (isinstance(word, ast.Constant) and word.value == "-m"):
                continue
            flags = [one.value for one in words[:index] if isinstance(one, ast.Constant)]
            if not any(str(flag).startswith("-") and {*str(flag)} & {*"PI"} for flag in flags):
                found.append(word.lineno)
    return found


def test_every_start_keeps_the_working_directory_out() -> None:
    unsafe = []
    for path in sorted((*(ROOT / "holdfast").rglob("*.py"), *(ROOT / "examples").rglob("*.py"))):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if '"-m"' in text and name not in RANKS:
            unsafe += [f"{name}:{line}" for line in unsafe_starts(text)]
        unsafe += [name] if "python3 -m holdfast" in text else []
    assert not unsafe, "start our own programs by `python -P -m`"


def test_nothing_sets_what_ranks_would_inherit() -> None:
    """The variable would take the user's own folder from the imports of ranks."""
    for path in (ROOT / "holdfast").rglob("*.py"):
        for node in ast.walk(ast.parse(text)) if "PYTHONSAFEPATH" in (text := path.read_text()) else ():
            keys = node.keys if isinstance(node, ast.Dict) else []
            stored = [node.slice] if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else []
            set_ = [one.value for one in (*keys, *stored) if isinstance(one, ast.Constant)]
            assert "PYTHONSAFEPATH" not in set_, path


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('run([python, "-m", "x"])', [1]),
        ('run(python, "-u", "-m", "x")', [1]),
        ('run([python, "-P", "-m", "x"])', []),
        ('run((python, "-PS", "-m", "x"))', []),
    ],
)
def test_what_counts_as_one(text: str, lines: list[int]) -> None:
    assert unsafe_starts(text) == lines
