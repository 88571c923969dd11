"""The time that ranks take between collectives, as one character for each."""

from holdfast.core.diagnose.lateness_map import LatenessMap


def test_one_character_for_each_rank() -> None:
    made = LatenessMap()
    assert made.encode(4) == ""
    made.add_round({0: 0.0, 1: 0.12, 3: -0.5, 4: 3.0, 5: 0.004})
    assert made.encode(6) == "lx.a9l"


def test_rounds_are_averaged() -> None:
    made = LatenessMap()
    made.add_round({0: 0.0, 1: 0.0})
    made.add_round({0: 0.2})
    assert made.encode(2) == "rl"  # 6 percent; a rank that a round does not tell of stays as it was
    for _ in range(20):
        made.add_round({0: 0.2, 1: 0.0})
    assert made.encode(2) == "Fl"


def test_a_large_job_is_a_short_text() -> None:
    made = LatenessMap()
    made.add_round({rank: rank / 1e5 for rank in range(16384)})
    assert len(made.encode(16384)) == 16384
