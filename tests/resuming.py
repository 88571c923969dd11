"""A long run of tests that goes on where it was: `pytest -p tests.resuming --resume=FILE`.

FILE lists what has passed. Whatever has passed with the very same files of this project is left out. With
`--record=FILE` instead, all is run, and what passes is listed for a longer run that comes later.
"""

import hashlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("holdfast", "tests", "examples", "benchmarks", "docs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", type=Path, metavar="FILE", help="leave out what has passed, and add what passes")
    parser.addoption("--record", type=Path, metavar="FILE", help="add what passes")


def pytest_configure(config: pytest.Config) -> None:
    for option in ("--resume", "--record"):
        path: Path | None = config.getoption(option)
        if path is not None:
            writes, leaves_out = not hasattr(config, "workerinput"), option == "--resume"
            config.pluginmanager.register(Passed(path, writes=writes, leaves_out=leaves_out))


class Passed:
    def __init__(self, path: Path, *, writes: bool, leaves_out: bool) -> None:
        self._path, self._writes, self._leaves_out, self._key = path, writes, leaves_out, digest()
        lines = path.read_text().splitlines() if path.exists() else []
        self._known = {*lines[1:]} if lines[:1] == [self._key] else set()
        self._failed: set[str] = set()
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in (self._key, *sorted(self._known))))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self._leaves_out:
            return
        known = [item for item in items if item.nodeid in self._known]
        items[:] = [item for item in items if item.nodeid not in self._known]
        config.hook.pytest_deselected(items=known)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        if self._writes and report.when == "teardown" and report.nodeid not in self._failed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")


def digest() -> str:
    """Of all that a test may depend on, but for what is installed."""
    found = hashlib.sha256()
    for folder in FOLDERS:
        for place, folders, names in os.walk(ROOT / folder):
            folders[:] = sorted(name for name in folders if name not in ("__pycache__", "results"))
            for name in sorted(names):
                seen = os.stat(f"{place}/{name}")  # to read them all would take longer than many a test
                found.update(f"{place}/{name} {seen.st_size} {seen.st_mtime_ns}\n".encode())
    return found.hexdigest()
