"""For how much of the time ranks of one group wait for each other, from a few of their collectives."""

import pytest

from holdfast.core.diagnose.collective_lateness import CollectiveLateness


def told(made: CollectiveLateness, late: dict[int, float], seqs: range, step_s: float = 0.5) -> None:
    """Two collectives a step; the first shows who is late, after it all go on together."""
    for rank, late_s in late.items():
        for seq in seqs:
            made.on_arrival(rank, seq, seq // 2 * step_s + (late_s if seq % 2 == 0 else 0.01))


def test_shares_of_the_time() -> None:
    made = CollectiveLateness()
    told(made, {0: 0.0, 1: 0.0, 2: 0.1}, range(2, 4))
    told(made, {0: 0.0, 1: 0.0, 2: 0.1}, range(4, 24))
    shares = made.take_shares()
    assert shares[2] == pytest.approx(0.2, rel=0.1)
    assert shares[0] == shares[1] == 0.0


def test_a_round_ends_when_it_is_asked_for() -> None:
    made = CollectiveLateness()
    told(made, {0: 0.0, 1: 0.0, 2: 0.1}, range(2, 24))
    made.take_shares()
    assert made.count == 0 and made.take_shares() == {}
    told(made, {0: 0.1, 1: 0.0, 2: 0.0}, range(24, 44))
    shares = made.take_shares()
    assert shares[0] == pytest.approx(0.2, rel=0.1) and shares[2] == 0.0


def test_what_is_told_again_counts_once() -> None:
    made = CollectiveLateness()
    for _ in range(3):
        told(made, {0: 0.0, 1: 0.2}, range(2, 12))
    assert made.count == 10


def test_who_is_judged_before_all_have_told_is_judged_again() -> None:
    made = CollectiveLateness()
    told(made, {0: 0.0, 1: 0.2}, range(2, 12))
    told(made, {2: 0.0}, range(2, 12))
    assert made.count == 0, "of a group of three only two had told"
    told(made, {0: 0.0, 1: 0.2, 2: 0.0}, range(12, 22))
    assert made.count == 10


def test_a_collective_that_one_never_tells_of_is_no_evidence() -> None:
    made = CollectiveLateness()
    for rank in range(3):
        made.on_arrival(rank, 1, 0.0)
    for seq in range(2, 2000):
        made.on_arrival(0, seq, seq * 1.0)
        made.on_arrival(1, seq, seq + 0.5)
    assert made.count == 0 and len(made._open) <= 512
