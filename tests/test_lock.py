"""What continuous integration installs is what we develop with, and every file of it is known by its hash."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NAME = re.compile(r"[\w-]+")


def _pinned(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w-]+)==([\w.+]+)", text, re.M):
        found.setdefault(name, set()).add(version)
    return found


def test_the_lock_agrees_with_the_constraints() -> None:
    locked = _pinned((ROOT / "locked.txt").read_text())
    wanted = _pinned((ROOT / "constraints.txt").read_text())
    differ = {name for name in wanted.keys() & locked.keys() if wanted[name] != locked[name]}
    assert not differ, f"make lock: {differ}"


def test_the_lock_has_all_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["test"]]
    asked += project["build-system"]["requires"]
    names = {match[0] for one in asked if (match := _NAME.match(one))} - {"torch"}
    assert not names - _pinned((ROOT / "locked.txt").read_text()).keys(), "make lock"


def test_every_file_has_its_hash() -> None:
    entries = re.split(r"^(?=[a-z])", (ROOT / "locked.txt").read_text(), flags=re.M)[1:]
    assert len(entries) > 50
    assert all("--hash=sha256:" in entry for entry in entries)
