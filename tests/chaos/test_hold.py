"""A process is the one that was meant, or nobody is hit."""

import signal

import pytest

from holdfast.chaos.fault import Cannot
from holdfast.chaos.hold import Held, children, command, started
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


def test_children_and_their_commands() -> None:
    import os

    with target() as process:
        until(lambda: process.pid in children(os.getpid()), "our child")
        until(lambda: "-c" in command(process.pid), "its command line")
