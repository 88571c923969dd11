"""The book: pieces tile the clock, what is lost is counted once, and windows are what they say."""

import pytest

from holdfast.sim.scale.book import TRAIN, Book


def book() -> Book:
    made = Book()
    made.add(TRAIN, 3600.0)
    made.add("detect", 3660.0, "hang")
    made.add("launch", 3780.0, "hang")
    made.add(TRAIN, 7200.0)
    return made


def test_what_is_lost_by_use_and_cause() -> None:
    made = book()
    made.drag(100.0, 20.0, "hot")
    assert made.by_use(0.0) == {"launch": 120.0, "detect": 60.0, "slow": 20.0}
    assert made.by_cause(0.0) == {"hang": 180.0, "hot": 20.0}
    assert made.productive_s(0.0) == 7200 - 180 - 20
    lost = sum(made.by_use(0.01).values())
    assert lost + made.productive_s(0.01) == pytest.approx(made.wall_s)


def test_hours() -> None:
    instants, total, sliding = book().curves()
    assert instants == [3600.0, 7200.0]
    assert total == [1.0, pytest.approx(1 - 180 / 7200)]
    assert sliding == [1.0, pytest.approx(1 - 180 / 3600)]
    assert min(book().curves(600.0)[2]) == pytest.approx(1 - 180 / 3600)


def test_nothing_after_the_end_counts() -> None:
    made = book()
    made.drag(7000.0, 5.0, "late")
    made.cut(3700.0)
    assert made.wall_s == 3700.0
    assert made.by_use(0.0) == {"detect": 60.0, "launch": 40.0}


def test_no_piece_goes_back_in_time() -> None:
    made = book()
    made.add("wait", 7000.0)
    assert made.at == 7200.0
