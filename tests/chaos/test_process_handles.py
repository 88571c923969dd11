"""A process is the one that was meant, or nobody is hit."""

import os
import signal

import pytest

from holdfast.chaos.injection_records import CannotInject
from holdfast.chaos.process_handles import (
    ProcessHandle,
    child_pids,
    command_line,
    is_descendant,
    open_confirmed,
    start_ticks,
)
from tests.chaos.target import stands, target
from tests.cli.driver import until

pytestmark = pytest.mark.e2e


def test_a_signal_reaches_it() -> None:
    with target() as process, ProcessHandle(process.pid) as held:
        assert held.stop() and stands(process.pid)
        held.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
        with pytest.raises(CannotInject, match=str(process.pid)):
            held.send_signal(signal.SIGKILL)


def test_another_time_of_birth_is_another_process() -> None:
    with target() as process:
        with pytest.raises(CannotInject, match=str(process.pid)):
            ProcessHandle(process.pid, start_ticks(process.pid) + 1)
        assert process.poll() is None


def test_nobody_is_there() -> None:
    with target() as process:
        process.kill()
        process.wait()
        with pytest.raises(CannotInject):
            ProcessHandle(process.pid)


def test_whom_it_was_is_looked_at_while_it_is_held() -> None:
    with target() as one, target() as other:
        with open_confirmed(lambda: one.pid) as held:
            assert held.pid == one.pid
        found = iter([one.pid, other.pid])
        with pytest.raises(CannotInject, match=str(one.pid)):
            open_confirmed(lambda: next(found))
        assert is_descendant(one.pid, os.getpid()) and not is_descendant(one.pid, other.pid)


def test_children_and_their_commands() -> None:
    with target() as process:
        until(lambda: process.pid in child_pids(os.getpid()), "our child")
        until(lambda: "-c" in command_line(process.pid), "its command line")
