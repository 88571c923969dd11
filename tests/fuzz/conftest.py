"""How much is tried: little with all other tests, for as long as told by `make fuzz`; and what an example may use.

PYTEST_HOLDFAST_FUZZ is how many seconds all of it may take on one processor. Every test then goes round anew, with
other chances, until its share is over.
"""

import functools
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

ROUND = 80  # examples, between two looks at the clock
MOST_BYTES = 768 << 20  # of new memory that one example may ask for
MOST_S = 10.0  # of processor time that one example may take
TRIED = "fuzz examples"
RECORD = "PYTEST_HOLDFAST_FUZZ_RECORD"  # a file for what was tried; for benchmarks/hostile.py
_CALM = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
_CALM += [HealthCheck.large_base_example, HealthCheck.filter_too_much]

_UNSHRUNK = [
    Phase.explicit,
    Phase.generate,
]  # shrinking lasts as long as a test may, and tells nothing before

settings.register_profile("fuzz", deadline=None, suppress_health_check=_CALM, database=None, print_blob=True)
settings.register_profile("quick", settings.get_profile("fuzz"), max_examples=5, phases=_UNSHRUNK)
settings.register_profile("long", settings.get_profile("fuzz"), max_examples=ROUND)


def budget_s() -> float:
    return float(os.environ.get("PYTEST_HOLDFAST_FUZZ", "0"))


settings.load_profile("long" if budget_s() else "quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test has the same share of the time."""
    ours = [item for item in items if _is_fuzz(item)]
    for item in ours:
        item.stash[_SHARE] = budget_s() / len(ours)


_SHARE = pytest.StashKey[float]()


def _is_fuzz(item: pytest.Item) -> bool:
    here = Path(__file__).parent in item.path.parents
    return here and isinstance(item, pytest.Function) and hasattr(item.obj, "hypothesis")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not _is_fuzz(pyfuncitem):
        return None
    tried = Tried(pyfuncitem.obj.hypothesis.inner_test)
    pyfuncitem.obj.hypothesis.inner_test = tried.within_bounds()
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    until = time.monotonic() + pyfuncitem.stash[_SHARE]
    try:
        while True:
            pyfuncitem.obj(**given)
            if time.monotonic() >= until:
                return True
    finally:
        pyfuncitem.obj.hypothesis.inner_test = tried.inner
        pyfuncitem.user_properties.append((TRIED, tried.count))


class Tried:
    """The examples of one test: counted, and held to what each may use."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.count = 0

    def within_bounds(self) -> Callable[..., Any]:
        @functools.wraps(self.inner)
        def bounded(*args: object, **kwargs: object) -> None:
            self.count += 1
            began_s = time.process_time()
            with _little_memory():
                self.inner(*args, **kwargs)
            took_s = time.process_time() - began_s
            assert took_s < MOST_S, f"one example took {took_s:.1f} s of processor time"

        return bounded


@contextmanager
def _little_memory() -> Iterator[None]:
    """A size that is believed as it stands in a header ends in a MemoryError, not in a machine that swaps."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not budget_s():
        return
    told = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    tried = {report.nodeid: dict(report.user_properties).get(TRIED, 0) for report in told}
    terminalreporter.write_sep("=", "fuzzing")
    for name, count in sorted(tried.items()):
        terminalreporter.write_line(f"{count:9,} {name.removeprefix('tests/fuzz/')}")
    crashed = [report.nodeid for report in terminalreporter.stats.get("failed", [])]
    if record := os.environ.get(RECORD):
        found = {"examples": sum(tried.values()), "tests": len(tried), "crashed": crashed}
        Path(record).write_text(json.dumps(found))
    terminalreporter.write_line(
        f"{sum(tried.values()):,} examples in {len(tried)} tests; {len(crashed)} of them crashed"
    )
