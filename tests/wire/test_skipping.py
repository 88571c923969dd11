"""What a rank reads of steps to leave out and to ease."""

import pytest

from holdfast.wire.skipping import eases_of, skips_of


def test_steps_are_read() -> None:
    assert skips_of("") == ()
    assert skips_of("101-103,200-200") == ((101, 103), (200, 200))
    assert eases_of("") == ()
    assert eases_of("0.5:101-200, 0.25:300-310") == ((0.5, (101, 200)), (0.25, (300, 310)))


@pytest.mark.parametrize("text", ["101", "a-b", "3-1", "-1-4", "0.5:1-2", "1-2;3-4"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no steps|invalid literal"):
        skips_of(text)


@pytest.mark.parametrize("text", ["1-2", "x:1-2", "2:1-2", "-0.5:1-2", "nan:1-2", "0.5:2-1", "0.5"])
def test_nonsense_is_no_part_of_a_rate(text: str) -> None:
    with pytest.raises(ValueError, match=r"no part|no steps|invalid literal|could not convert"):
        eases_of(text)
