"""What a rank reads of steps to leave out and to ease."""

import pytest

from holdfast.wire.skip_ease_environment import parse_eases, parse_skips


def test_steps_are_read() -> None:
    assert parse_skips("") == ()
    assert parse_skips("101-103,200-200") == ((101, 103), (200, 200))
    assert parse_eases("") == ()
    assert parse_eases("0.5:101-200, 0.25:300-310") == ((0.5, (101, 200)), (0.25, (300, 310)))


@pytest.mark.parametrize("text", ["101", "a-b", "3-1", "-1-4", "0.5:1-2", "1-2;3-4"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_skips(text)


@pytest.mark.parametrize("text", ["1-2", "x:1-2", "2:1-2", "-0.5:1-2", "nan:1-2", "0.5:2-1", "0.5"])
def test_nonsense_is_no_part_of_a_rate(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_eases(text)
