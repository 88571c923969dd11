"""The table of attacks: every row cites a test that there is."""

import ast
from pathlib import Path

import pytest

from benchmarks import _door_attacks
from benchmarks._door_attacks import Attack, read_attacks

TESTS = Path(__file__).parents[1]


def missing(attack: Attack) -> bool:
    path = TESTS / attack.file
    if not path.is_file():
        return True
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return attack.test not in {function.name for function in functions}


def test_every_attack_cites_a_test_that_there_is() -> None:
    attacks = read_attacks()
    assert len(attacks) >= 30 and len({attack.attack for attack in attacks}) == len(attacks)
    assert [attack for attack in attacks if missing(attack)] == []


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("`cli/test_attacks.py::test_he_calls_at_the_port`", False),
        ("`cli/test_attacks.py::test_he_stays_at_home`", True),
        ("`cli/test_nowhere.py::test_he_calls_at_the_port`", True),
    ],
)
def test_a_test_that_is_not_there_is_noticed(cell: str, found: bool, tmp_path: Path) -> None:
    page = tmp_path / "SECURITY.md"
    page.write_text(
        f"| attack | before | now | test |\n|---|---|---|---|\n| a | b | c | {cell} |\n\n| other | table |\n"
    )
    [attack] = read_attacks(page)
    assert missing(attack) is found


@pytest.mark.parametrize("row", ["| a | b | c | `cli/test_attacks.py` |", "| a | b | `cli/test_attacks.py::test_x` |"])
def test_a_row_without_a_test_is_an_error(row: str, tmp_path: Path) -> None:
    page = tmp_path / "SECURITY.md"
    page.write_text(f"| attack | before | now | test |\n|---|---|---|---|\n{row}\n")
    with pytest.raises(ValueError, match=r"file::test"):
        read_attacks(page)
    with pytest.raises(ValueError, match=r"JOURNAL\.md"):
        read_attacks(_door_attacks.PAGE.parent / "JOURNAL.md")
