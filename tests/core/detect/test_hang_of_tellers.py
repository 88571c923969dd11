"""Stands of a job in which some ranks tell of no steps."""

import msgspec
import pytest

from holdfast.core.detect.hang import HangDetector
from tests.core.detect.test_hang import LIMITS, STOPPED, beat, passes, seen


def test_a_rank_that_tells_of_no_step_does_not_hide_a_stand_of_those_that_do() -> None:
    made = HangDetector(LIMITS)
    made.on_launch(100.0, 1, ("n0", "n1"))
    mute = msgspec.structs.replace(beat("n0", -1), running=1)
    for step in range(1, 41):
        made.should_look(100.0 + 0.2 * step)
        made.on_beat(100.0 + 0.2 * step, mute)
        made.on_beat(100.0 + 0.2 * step, msgspec.structs.replace(beat("n1", step), first_step=1))
    now = passes(made, 108.0, 60)
    assert (made.step, made.moved_at) == (40, 108.0) and now == pytest.approx(111.0, abs=0.3)
    alarm = made.on_traces(now, seen(now), STOPPED)
    assert alarm and (alarm.at, alarm.ranks) == (108.0, STOPPED.ranks) and " step 40 for 3 s: " in alarm.reason


def test_a_rank_that_hangs_before_its_first_step_is_found_when_the_others_wait_for_it() -> None:
    """In step with the others it keeps them from their first steps; else they come to wait for it later."""
    for steps, patience_s in ((0, 900), (1, 900), (40, 3)):
        made = HangDetector(LIMITS)
        made.on_launch(100.0, 1, ("n0", "n1"))
        for step in range(steps + 1):
            made.should_look(100.0)
            made.on_beat(100.0, msgspec.structs.replace(beat("n1", -1), running=1))
            made.on_beat(100.0, msgspec.structs.replace(beat("n0", step or -1), first_step=1, running=1))
        assert made.patience_s == patience_s
        assert (alarm := made.on_traces(2000.0, seen(2000.0), STOPPED)) and alarm.ranks == (1,)
