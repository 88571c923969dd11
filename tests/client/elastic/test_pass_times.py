"""What a worker takes for its layers' passes and for sending, by a clock that is set."""

import pytest

from holdfast.client.elastic.pass_times import PassTimes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float) -> float:
        """Let time pass; return the instant before."""
        self.now += seconds
        return self.now - seconds


def make_step(times: PassTimes, clock: Clock, forward_s: float, *, microbatches: int = 2, sent: int = 2) -> None:
    times.begin_step()
    for _ in range(microbatches):
        times.add_forward(3, clock.take(forward_s))
        times.add_backward(3, clock.take(2 * forward_s))
    for _ in range(sent):
        times.add_sends(0.001, 1)
    times.add_sends(0.002, 0)
    times.end_step()


def forward_s(times: PassTimes) -> float:
    [found] = times.list_layers()
    return found.forward_s


def test_a_few_steps_say_nothing() -> None:
    clock = Clock()
    times = PassTimes(clock)
    for _ in range(7):
        make_step(times, clock, 0.01)
    assert (times.list_layers(), times.median_send_s()) == ((), 0.0)
    make_step(times, clock, 0.01)
    [found] = times.list_layers()
    assert found.layer == 3 and (found.forward_s, found.backward_s) == pytest.approx((0.01, 0.02))
    assert times.median_send_s() == pytest.approx(0.002)


def test_a_few_slow_steps_change_nothing_and_a_lasting_change_does() -> None:
    clock = Clock()
    times = PassTimes(clock)
    for number in range(16):
        make_step(times, clock, 0.5 if number % 4 == 0 else 0.01)
    assert forward_s(times) == pytest.approx(0.01)
    for _ in range(12):
        make_step(times, clock, 0.04)
    assert forward_s(times) == pytest.approx(0.04)


def test_another_plan_begins_anew() -> None:
    clock = Clock()
    times = PassTimes(clock)
    for _ in range(8):
        make_step(times, clock, 0.01)
    times.forget()
    assert (times.list_layers(), times.median_send_s()) == ((), 0.0)


def test_who_sends_nothing_knows_nothing_of_sending() -> None:
    clock = Clock()
    times = PassTimes(clock)
    for _ in range(8):
        make_step(times, clock, 0.01, sent=0)
    assert times.list_layers() and times.median_send_s() == 0.0
