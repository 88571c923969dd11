"""A process is the one that was meant, or nobody is hit."""

import os
import signal

import pytest

from holdfast.chaos.fault import Cannot
from holdfast.chaos.hold import Held, children, command, is_below, started, sure
from tests.chaos.target import stands, target
from tests.cli.driver import until

pytestmark = pytest.mark.e2e


def test_a_signal_reaches_it() -> None:
    with target() as process, Held(process.pid) as held:
        assert held.stop() and stands(process.pid)
        held.signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
        with pytest.raises(Cannot, match="has ended"):
            held.signal(signal.SIGKILL)


def test_another_time_of_birth_is_another_process() -> None:
    with target() as process:
        with pytest.raises(Cannot, match="has ended"):
            Held(process.pid, started(process.pid) + 1)
        assert process.poll() is None


def test_nobody_is_there() -> None:
    with target() as process:
        process.kill()
        process.wait()
        with pytest.raises(Cannot):
            Held(process.pid)


def test_whom_it_was_is_looked_at_while_it_is_held() -> None:
    with target() as one, target() as other:
        with sure(lambda: one.pid) as held:
            assert held.pid == one.pid
        found = iter([one.pid, other.pid])
        with pytest.raises(Cannot, match=f"process {one.pid} has ended"):
            sure(lambda: next(found))
        assert is_below(one.pid, os.getpid()) and not is_below(one.pid, other.pid)


def test_children_and_their_commands() -> None:
    with target() as process:
        until(lambda: process.pid in children(os.getpid()), "our child")
        until(lambda: "-c" in command(process.pid), "its command line")
