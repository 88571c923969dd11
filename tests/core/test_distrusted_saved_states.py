"""Which states are given up after a loss that is not finite."""

import msgspec

from holdfast.core.decide.distrusted_saved_states import DoubtfulStates
from holdfast.model.decider_events import Progress
from holdfast.model.state_doubt import Doubt


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


def made(generation: int, first: int, last: int, *, loss: float | None = 1.0, counted: bool = False) -> Progress:
    made = Progress(generation=generation, step=last, at=0.0, first_step=first, first_at=0.0, counted=counted)
    return msgspec.structs.replace(made, loss=loss)


def fail(doubts: DoubtfulStates, generation: int, went_on_from: int, bad: int) -> tuple[int | None, bool]:
    """The generation makes sound steps from a state on, until a loss is not finite."""
    progress = made(generation, went_on_from + 1, bad)
    doubts.on_progress(made(generation, went_on_from + 1, bad, loss=None))
    doubts.doubt_after(Doubt(generation=generation, not_after=bad - 1), progress, not_finite=True)
    doubts.on_training()
    last = doubts.all[-1]
    return last.not_after, any(doubt.bans_state(1, went_on_from) for doubt in doubts.all)


def test_no_state_is_given_up_for_a_step_that_was_sound_before() -> None:
    doubts = DoubtfulStates()
    assert fail(doubts, 1, 0, 376) == (375, False)
    assert fail(doubts, 2, 375, 376) == (374, True), "step 376 never had a finite loss"
    for generation in range(3, 12):
        assert fail(doubts, generation, 350, 351) == (350, False), "step 351 had one, made from this state"
    doubts.doubt_after(Doubt(generation=12, not_after=350), None, not_finite=True)
    assert (doubts.not_after, doubts.verified) == (350, False)


def test_a_state_made_by_another_generation_meanwhile_is_no_proof() -> None:
    doubts = DoubtfulStates()
    fail(doubts, 1, 0, 110)
    doubts.on_progress(made(2, 96, 98))  # then a rank crashed
    assert fail(doubts, 3, 97, 99) == (96, True), "generation 1 made another state of step 97, which was sound"
    doubts.on_progress(made(4, 1, 3, counted=True))
    assert fail(doubts, 5, 50, 52) == (49, True), "nobody knows which steps generation 4 made"


def test_losses_that_differ_prove_no_state_sound() -> None:
    doubts = DoubtfulStates()
    fail(doubts, 1, 0, 110)
    doubts.doubt_after(Doubt(generation=2, not_after=100), made(2, 101, 102))
    assert (doubts.not_after, doubts.verified) == (99, True)


def test_what_led_to_the_same_step_from_several_states_is_not_their_fault() -> None:
    doubts = DoubtfulStates()
    fail(doubts, 1, 0, 60)
    assert fail(doubts, 2, 50, 60) == (49, True)
    assert fail(doubts, 3, 40, 60) == (39, True)
    doubts.doubt_after(Doubt(generation=4, not_after=59), made(4, 31, 60), not_finite=True)
    assert doubts.not_after == 29
    later = [doubt.for_later_runs for doubt in doubts.all]
    assert not any(doubt.bans_state(1, 50) for doubt in later), "sound steps were made from it twice"
    doubts.trust_redone()
    assert (doubts.not_after, doubts.verified) == (59, False)
    assert [doubt.not_after for doubt in doubts.all] == [59] * 4


def test_a_state_that_leads_to_it_at_once_twice_stays_in_doubt() -> None:
    doubts = DoubtfulStates()
    fail(doubts, 1, 0, 376)
    doubts.doubt_after(Doubt(generation=2, not_after=375), made(2, 376, 377), not_finite=True)
    doubts.trust_redone()
    assert doubts.not_after == 374
    assert doubts.all[-1].for_later_runs.bans_state(1, 375)


def spoilt(doubts: DoubtfulStates, generation: int, went_on_from: int, bad: int, *, seen: float | None = None) -> int:
    """A generation goes on from a state, and its loss is bad at this step; before it told of `seen`."""
    if seen is not None:
        doubts.on_progress(made(generation, went_on_from + 1, bad - 1, loss=seen))
    progress = made(generation, went_on_from + 1, bad, loss=None)
    doubts.on_progress(progress)
    good = doubts.find_last_good(generation, bad - 1, progress)
    doubts.doubt_after(Doubt(generation=generation, not_after=bad - 1), progress, not_finite=True, good_step=good)
    doubts.on_training()
    return good


def test_a_state_that_was_saved_after_the_loss_went_bad_stays_bad() -> None:
    doubts = DoubtfulStates()
    assert spoilt(doubts, 1, 0, 41, seen=1.0) == 40
    assert [spoilt(doubts, generation, 42, 43) for generation in (2, 3, 4)] == [40, 40, 40]
    assert spoilt(doubts, 5, 43, 44) == 40, "made by the second from it"
    assert spoilt(doubts, 6, 40, 51, seen=1.0) == 50, "went on from a good one"
    assert spoilt(doubts, 7, 50, 52) == 51, "which the one before had made soundly"


def test_a_state_in_doubt_that_leads_to_finite_losses_is_sound() -> None:
    doubts = DoubtfulStates()
    spoilt(doubts, 1, 0, 41, seen=1.0)
    assert spoilt(doubts, 2, 42, 60, seen=1.0) == 59


def test_a_state_of_a_generation_whose_loss_was_never_bad_is_good() -> None:
    doubts = DoubtfulStates()
    doubts.on_progress(made(1, 1, 50))
    assert spoilt(doubts, 2, 50, 51) == 50
    assert spoilt(doubts, 3, 45, 46) == 45
    unnumbered = made(4, 1, 50, counted=True)
    assert doubts.find_last_good(4, 46, unnumbered) == 46 and doubts.find_last_good(5, 46, None) == 46
