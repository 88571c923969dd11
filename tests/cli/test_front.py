"""The front's ear for signals, and its last words about a node."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.front import Asked, _farewell


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, action in before.items():
        signal.signal(number, action)


def test_signals_are_counted() -> None:
    asked = Asked()
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked.numbers == [signal.SIGTERM]
    assert asked.code == 143
    assert not asked.more_than(1)()
    os.kill(os.getpid(), signal.SIGINT)
    assert asked.more_than(1)()
    assert asked.code == 143, "the first one counts"


def test_a_terminal_that_goes_away_is_no_wish_to_end() -> None:
    for before in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGHUP, before)
        asked = Asked()
        os.kill(os.getpid(), signal.SIGHUP)
        assert asked.numbers == []


def test_why_a_node_left(tmp_path: Path) -> None:
    assert _farewell(tmp_path, -9) == f"this node is lost: its holder ended with code -9; see {tmp_path}/holder.log"
    (tmp_path / "left").write_text("all ranks ended well\n")
    assert _farewell(tmp_path, 0) == "done: all ranks ended well"
    (tmp_path / "left").write_text("evicted\n")
    assert _farewell(tmp_path, 1) == "this node left the job with code 1: evicted"
