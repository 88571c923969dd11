"""The simulator beside what was published: it agrees, but where it is known not to."""

import pytest

from holdfast.sim.scale import validation


def test_the_closed_form_within_5_percent() -> None:
    found = validation.check_closed_form(1)
    assert len(found) == 20
    assert all(one.agrees for one in found if not one.known)
    assert all(float(one.published) < 0.5 for one in found if one.known), "only where failures are not rare"


def test_the_closed_form_is_the_published_one() -> None:
    every_s = validation.daly_interval_s(1200, 0.0065, 300.0)
    assert round(validation.meta_ettr(1200, 0.0065, every_s, 300.0, 300.0), 2) == 0.77
    assert (
        round(validation.meta_ettr(1200, 0.0065, validation.daly_interval_s(1200, 0.0065, 0.1), 0.1, 60.0), 3) == 0.990
    )


def test_tables_of_byterobust() -> None:
    found = [*validation.check_standbys(), *validation.check_restarts(), *validation.check_scheduling(4000)]
    assert [one.what for one in found if not one.agrees] == []


@pytest.mark.slow
def test_llama_3() -> None:
    count, *others = validation.check_llama(1)
    assert count.agrees
    assert [one.agrees for one in others] == [False, False], "the usual practice is too slow, and people are needed"
    assert all(one.known and one.note for one in others)


def test_what_disagrees_is_said() -> None:
    (found,) = validation.check_byterobust(1)
    assert not found.agrees and found.known and "minutes each" in found.note
