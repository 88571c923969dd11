from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.snapshots.gap_pacing import (
    PacingChoice,
    StepMoment,
    choose_pacing,
    find_window,
    fit_piece,
    rest_after,
)
from holdfast.core.snapshots.step_network_profile import StepGaps

GAPS = StepGaps(step_s=1.0, gaps=((0.0, 0.4), (0.6, 0.9)))
AUTO = PacingChoice.AUTO


@pytest.mark.parametrize(
    ("choice", "gaps", "copy_bytes", "bytes_s", "why"),
    [
        (AUTO, GAPS, 200, 1000.0, ""),
        (AUTO, GAPS, 240, 1000.0, ""),
        (AUTO, GAPS, 260, 1000.0, "backup.duty"),
        (AUTO, GAPS, 600, 1000.0, "too small"),
        (AUTO, GAPS, 1, 0.0, "speed"),
        (AUTO, StepGaps(why="steps vary too much"), 1, 1e9, "steps vary too much"),
        (PacingChoice.GAPS, GAPS, 600, 1000.0, ""),
        (PacingChoice.GAPS, StepGaps(why="no collectives have been seen"), 1, 1e9, "no collectives"),
        (PacingChoice.DUTY, GAPS, 1, 1e9, "backup.pacing is duty"),
    ],
)
def test_what_paces_a_copy(choice: PacingChoice, gaps: StepGaps, copy_bytes: int, bytes_s: float, why: str) -> None:
    pacing = choose_pacing(choice, gaps, 0.25, copy_bytes, bytes_s)
    assert pacing.gaps == (not why) and why in pacing.why


def test_a_window_is_open_where_all_ranks_have_a_gap() -> None:
    one = StepMoment(100.0, GAPS)
    assert find_window(100.1, [one]).open_until == pytest.approx(100.4)
    assert find_window(100.5, [one]).again_at == pytest.approx(100.6)
    assert find_window(100.95, [one]).again_at == pytest.approx(101.0)  # with the next step
    late = find_window(101.3, [one])
    assert not late.open_until and late.again_at == pytest.approx(101.304)  # it should have begun: look often
    behind = StepMoment(100.3, GAPS)
    assert find_window(100.35, [one, behind]).open_until == pytest.approx(100.4)
    assert find_window(100.5, [one, behind]).again_at == pytest.approx(100.6)
    assert find_window(100.65, [one, behind]).open_until == pytest.approx(100.7)


def test_a_rank_that_makes_no_steps_closes_no_window() -> None:
    stands = StepMoment(90.0, GAPS)
    assert find_window(100.1, [stands]).open_until == inf
    assert find_window(100.1, [stands, StepMoment(100.0, GAPS)]).open_until == pytest.approx(100.4)
    assert find_window(100.5, []).open_until == inf


@given(now=st.floats(0, 50), begins=st.lists(st.floats(0, 50), min_size=1, max_size=4))
def test_a_window_is_in_a_gap_of_every_rank_or_tells_when_to_look_again(now: float, begins: list[float]) -> None:
    ranks = [StepMoment(at, GAPS) for at in begins if at <= now]
    window = find_window(now, ranks)
    if not window.open_until:
        assert window.again_at > now
        return
    for begun_at, gaps in ranks:
        into_s = now - begun_at
        inside = [end for start, end in gaps.gaps if start <= into_s < end]
        assert into_s >= 3 * gaps.step_s or (inside and window.open_until <= begun_at + inside[0])


def test_a_piece_fits_into_what_is_left_of_the_gap() -> None:
    assert fit_piece(0.1, 1e6, 0, 1 << 18) == 100_000
    assert fit_piece(0.1, 1e6, 60_000, 1 << 18) == 40_000  # some is still queued
    assert fit_piece(0.1, 1e6, 90_000, 1 << 18) == 0  # too little to be worth it
    assert fit_piece(0.1, 1e6, 90_000, 8_000) == 8_000  # the end of a chunk
    assert fit_piece(0.1, 1e9, 0, 1 << 18) == 1 << 18
    assert fit_piece(inf, 1e6, 1 << 30, 1 << 18) == 1 << 18


def test_sending_takes_its_duty_of_the_time() -> None:
    assert rest_after(1.0, 1.0, 0.5, 0.25) == 3.0  # sent without a pause
    assert rest_after(1.0, 0.2, 0.5, 0.25) == 0.0  # it took two steps, and was sent for a fifth of them
    assert rest_after(0.2, 0.2, 1.0, 0.25) == 0.0  # in one gap; the next copy has its turn in the next step
    assert rest_after(0.4, 0.4, 1.0, 0.25) == pytest.approx(0.6)
