"""What every test shares: end-to-end tests run one at a time and must leave no process and no shared memory behind."""

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

MARK = "HOLDFAST_TEST_MARK"
T = TypeVar("T")
PATIENCE_S = 10.0  # a process that was told to end is given this long on a busy machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Two end-to-end tests at once on two cores would measure each other; one beside the pure tests is fine.
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.xdist_group("e2e"))


@pytest.fixture(autouse=True)
def _e2e_leaves_nothing(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("e2e"):
        request.getfixturevalue("clean_shm")
        request.getfixturevalue("no_orphans")


@pytest.fixture
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The mark that processes started by this test inherit; a test that builds an environment anew adds it as MARK.

    A process that the test forks without exec does not show the mark; its children that exec do.
    """
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    left = _settled(lambda: marked(mark))
    if left:
        story = "\n".join(f"  {pid}: {_argv(pid)}" for pid in left)
        kill_marked(mark)
        pytest.fail(f"processes outlived the test and were killed:\n{story}", pytrace=False)


@pytest.fixture
def clean_shm() -> Iterator[None]:
    # A file of a test running beside this one goes away by itself; a leaked one stays.
    before = _shm()
    yield
    left = _settled(lambda: _shm() - before)
    assert not left, f"left in /dev/shm: {sorted(left)}"


def marked(mark: str) -> set[int]:
    """Every process that was started, however indirectly, with this mark in its environment."""
    return {int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal() and _carries(int(p.name), mark)}


def kill_marked(mark: str) -> None:
    """Kill exactly these, repeatedly: a holder may restart an agent between the look and the shot."""
    until = time.monotonic() + PATIENCE_S
    while (pids := marked(mark)) and time.monotonic() < until:
        for pid in pids:
            _kill(pid, mark)
        time.sleep(0.02)


def _kill(pid: int, mark: str) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _carries(pid, mark):  # looked at again: the fd now pins the process, so a reused pid cannot be hit
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def _carries(pid: int, mark: str) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or another user's, hence not ours
        return False
    return f"{MARK}={mark}".encode() in variables


def _argv(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def _shm() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob("holdfast*")}


def _settled(look: Callable[[], set[T]]) -> set[T]:
    until = time.monotonic() + PATIENCE_S
    while (left := look()) and time.monotonic() < until:
        time.sleep(0.05)
    return left


@pytest.fixture(scope="session")
def setting_names() -> list[str]:
    """Every setting by its dotted name, as it is written after --set."""
    from holdfast.config import Settings

    return list(leaves(Settings))


def leaves(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from leaves(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name
