"""What continuous integration and the image install is what we develop with, every file known by its hash."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_NAME = re.compile(r"[\w-]+")


def _pinned(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w-]+)==([\w.+]+)", text, re.M):
        found.setdefault(name, set()).add(version)
    return found


LOCKS = {  # and the extras in each
    "locked.txt": {"test"},
    "locked-image.txt": {"gpu", "export", "postgres", "s3", "kubernetes", "otel"},
}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_agrees_with_the_constraints(lock: str) -> None:
    locked = _pinned((ROOT / lock).read_text())
    wanted = _pinned((ROOT / "constraints.txt").read_text())
    differ = {name for name in wanted.keys() & locked.keys() if wanted[name] != locked[name]}
    assert not differ, f"make lock: {differ}"


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_all_that_is_installed(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    asked += [one for extra in LOCKS[lock] for one in project["project"]["optional-dependencies"][extra]]
    names = {match[0] for one in asked if (match := _NAME.match(one))} - {"torch"}
    assert not names - _pinned((ROOT / lock).read_text()).keys(), "make lock"


def test_the_image_has_nothing_of_tests() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for_tests, for_use = (
        {match[0] for extra in some for one in extras[extra] if (match := _NAME.match(one))}
        for some in (("test", "test-full"), LOCKS["locked-image.txt"])
    )
    locked = _pinned((ROOT / "locked-image.txt").read_text()).keys()
    assert (for_tests - for_use) & locked <= {"numpy", "hatchling"}, "torch asks for the one, and the other builds us"
    assert "pip install --no-deps --require-hashes -r locked-image.txt" in (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("lock", LOCKS)
def test_every_file_has_its_hash(lock: str) -> None:
    entries = re.split(r"^(?=[a-z])", (ROOT / lock).read_text(), flags=re.M)[1:]
    assert len(entries) > 50
    assert all("--hash=sha256:" in entry for entry in entries)
