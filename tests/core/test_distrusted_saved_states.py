"""Which states are given up after a loss that is not finite."""

from holdfast.core.decide.distrusted_saved_states import DoubtfulStates
from holdfast.model.event import Progress
from holdfast.model.state_copy import Doubt


def went_on_from(step: int, counted: bool = False) -> Progress:
    return Progress(generation=1, step=200, at=0.0, first_step=step + 1, first_at=0.0, counted=counted)


def test_the_first_time_the_state_before_is_believed() -> None:
    doubts = DoubtfulStates()
    doubts.doubt_after(Doubt(generation=1, not_after=119), went_on_from(0))
    assert (doubts.not_after, doubts.verified) == (119, False)
    assert doubts.all == (Doubt(generation=1, not_after=119),)
    doubts.on_training()
    assert doubts.not_after is None and doubts.all, "checkpoints stay doubted"


def test_a_state_that_led_to_it_twice_is_poisoned() -> None:
    doubts = DoubtfulStates()
    doubts.doubt_after(Doubt(generation=1, not_after=119), went_on_from(0))
    doubts.doubt_after(Doubt(generation=2, not_after=119), went_on_from(118))
    assert (doubts.not_after, doubts.verified) == (117, True)
    doubts.doubt_after(Doubt(generation=3, not_after=119), went_on_from(100))
    assert (doubts.not_after, doubts.verified) == (99, True)


def test_in_the_very_first_step_it_is_the_state_itself() -> None:
    doubts = DoubtfulStates()
    doubts.doubt_after(Doubt(generation=1, not_after=119), went_on_from(0))
    doubts.doubt_after(Doubt(generation=2, not_after=119), None)
    assert (doubts.not_after, doubts.verified) == (118, True)


def test_further_on_it_is_another_matter() -> None:
    doubts = DoubtfulStates()
    doubts.doubt_after(Doubt(generation=1, not_after=119), went_on_from(0))
    doubts.doubt_after(Doubt(generation=2, not_after=300), went_on_from(118))
    assert (doubts.not_after, doubts.verified) == (300, False)


def test_where_the_script_restores_itself_nobody_knows_what_to_blame() -> None:
    doubts = DoubtfulStates()
    doubts.doubt_after(Doubt(generation=1, not_after=119), went_on_from(0, counted=True))
    doubts.doubt_after(Doubt(generation=2, not_after=119), went_on_from(118, counted=True))
    assert doubts.not_after == 119
