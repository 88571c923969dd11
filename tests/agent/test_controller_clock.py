"""The controller's time is kept by a steady clock, whatever happens to the machine's own."""

import time

import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.connection.controller_clock import ControllerClock


def test_a_clock_that_is_set_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ControllerClock(SystemClock())
    known = [clock.known]
    assert abs(time.monotonic() + clock.offset_s - time.time()) < 5
    assert clock.wall_s() == 0.0
    clock.on_welcome(5000.0)
    known.append(clock.known)
    assert known == [False, True] and abs(time.monotonic() + clock.offset_s - 5000.0) < 60
    before = clock.offset_s
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
    assert clock.offset_s == before
    assert abs(time.time() + clock.wall_s() - 5000.0) < 60, "what others date by the machine's clock is right, too"


def test_on_the_controllers_machine_a_late_welcome_moves_nothing() -> None:
    ahead_s = 5000.0 - time.monotonic()
    near, far = ControllerClock(SystemClock(), same_machine=True), ControllerClock(SystemClock())
    for clock in (near, far):
        clock.on_welcome(4000.0, ahead_s)  # a thousand seconds on its way
    assert (near.offset_s, near.is_exact) == (ahead_s, True)
    assert not far.is_exact and far.offset_s < ahead_s - 900, "another machine's monotonic clock says nothing here"
    near.on_welcome(4000.0)
    assert not near.is_exact, "an older controller tells no more than its time"
