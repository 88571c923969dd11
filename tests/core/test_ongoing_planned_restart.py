"""Planned restarts: what is recorded of a pause, and what it cost."""

import msgspec

from holdfast.core.decide.ongoing_planned_restart import Pause
from holdfast.model.decider_events import Progress


def step(number: int, at: float, *, counted: bool = False, first: int = 1) -> Progress:
    return Progress(generation=1, step=number, at=at, first_step=first, first_at=at, counted=counted)


def test_a_change_tells_what_it_cost_without_what_was_held() -> None:
    pause = Pause.begin_pause(10.0, "held by ann", 1, step(5, 9.5))
    pause.on_late_step(step(6, 9.9))
    pause.stopped_at, pause.released_at, pause.launched_at = 10.5, 70.5, 71.0
    change = pause.make_change(step(7, 72.0, first=7), release=1)
    assert (change.good_step, change.resumed_from, change.held_s) == (6, 6, 60.0)
    assert change.sentence == "held by ann: restarted from step 6, held for 60.0 s, lost 2.1 s"


def test_a_script_that_restores_itself_leaves_open_from_where() -> None:
    pause = Pause.begin_pause(10.0, "release 2", 1, None)
    change = pause.make_change(step(2, 12.0, counted=True), release=2)
    assert (change.good_step, change.good_at, change.resumed_from) == (-1, 10.0, None)
    known = Pause.begin_pause(10.0, "release 2", 1, step(52, 10.0)).make_change(step(2, 12.0, counted=True), release=2)
    assert (known.good_step, known.resumed_from) == (52, None)
    assert known.sentence == (
        "release 2: restarted (whether the script resumed is not known: at most 52 steps redone), lost 2.0 s"
    )


def test_our_numbers_are_not_compared_with_those_of_the_script() -> None:
    pause = Pause.begin_pause(10.0, "release 2", 1, step(3, 10.0))  # it tells its epochs, and late
    ours = msgspec.structs.replace(step(301, 12.0, first=301), numbered=True)
    assert pause.make_change(ours, release=2).resumed_from is None
    anew = msgspec.structs.replace(step(1, 12.0), numbered=True)
    assert pause.make_change(anew, release=2).resumed_from == 0, "what begins at 0 does so by any numbers"


def test_what_the_checkpointer_restored_is_known_though_the_script_told_no_step_before() -> None:
    """It failed in its first save, so its one step was counted from the restored one; then it tells its steps."""
    counted = msgspec.structs.replace(step(441, 10.0, first=441), numbered=True, restored_at=9.0)
    pause = Pause.begin_pause(10.0, "release 2", 1, counted)
    told = step(441, 12.0, first=441)
    assert pause.make_change(told, release=2).resumed_from is None, "the script has restored itself"
    assert pause.make_change(msgspec.structs.replace(told, restored_at=11.0), release=2).resumed_from == 440


def test_what_the_checkpointer_restored_is_known_though_the_script_tells_no_step_since() -> None:
    """It raises in its first step after the restore, before it tells of the step: that one was counted."""
    pause = Pause.begin_pause(10.0, "release 2", 1, step(59, 10.0))
    counted = msgspec.structs.replace(step(60, 12.0, first=60), numbered=True, restored_at=11.0, restored=59)
    assert pause.make_change(counted, release=2).resumed_from == 59
    for other in (58, -1):  # the script numbers its states otherwise, or holdfast restored none
        unlike = msgspec.structs.replace(counted, restored=other)
        assert pause.make_change(unlike, release=2).resumed_from is None
    epochs = Pause.begin_pause(10.0, "release 2", 1, step(3, 10.0))
    assert epochs.make_change(counted, release=2).resumed_from is None, "no state is newer than the last step"


def test_steps_that_are_made_again_are_told_as_lost() -> None:
    pause = Pause.begin_pause(10.0, "release 2", 1, step(52, 10.0))
    pause.stopped_at, pause.launched_at = 10.1, 10.2
    change = pause.make_change(step(1, 11.0), release=2)
    assert change.sentence == "release 2: restarted, but the script started from step 0: lost 52 steps and 1.0 s"
    change = pause.make_change(step(42, 11.0, first=42), release=2)
    assert change.sentence == "release 2: restarted from step 41, lost 11 steps and 1.0 s"
