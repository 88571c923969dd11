"""The table of attacks in docs/SECURITY.md: what each did before, what it does now, and the test that plays it."""

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "SECURITY.md"
_HEAD = "| attack | before | now | test |"
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


class Attack(NamedTuple):
    attack: str
    before: str
    now: str
    file: str  # of its test, below tests/
    test: str


def read_attacks(page: Path = PAGE) -> list[Attack]:
    """Return the rows of the table. Raise ValueError for a row that does not cite one test of one file."""
    _, head, rest = page.read_text().partition(_HEAD)
    if not head:
        raise ValueError(f"{page} has no table of attacks")
    found = []
    for line in rest.strip().splitlines()[1:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        cited = _TEST.fullmatch(cells[-1])
        if len(cells) != 4 or cited is None:
            raise ValueError(f"{page}: no test is cited, as file::test, in: {line}")
        found.append(Attack(*cells[:3], *cited.groups()))
    return found
