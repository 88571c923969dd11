"""Counts, quiet times and floods."""

from holdfast.core.incident.alarm_rate_limit import AlarmRateLimit, RepeatFilter, SlidingSum, cap_stance
from holdfast.model.detector_alarm import Alarm, Kind, Stance

NOISE = Alarm(kind=Kind.LINES, at=0.0, suspects=("n0",), reason="says something")
HARD = Alarm(kind=Kind.HEALTH, at=0.0, suspects=("n0",), reason="has lost GPU 0", hard=True)


def test_the_quieter_stance_wins() -> None:
    assert cap_stance(Stance.ACT, Stance.NOTIFY) is Stance.NOTIFY
    assert cap_stance(Stance.OBSERVE, Stance.ACT) is Stance.OBSERVE


def test_sums_within_a_window() -> None:
    tally = SlidingSum()
    assert [tally.add(t, "k", 2.0, 10.0) for t in (0.0, 5.0, 10.0, 20.5)] == [2.0, 4.0, 6.0, 2.0]
    assert tally.add(20.5, "other", 1.0, 10.0) == 1.0
    tally.forget("k")
    assert tally.add(21.0, "k", 1.0, 10.0) == 1.0


def test_keys_made_by_others_are_bounded() -> None:
    tally, told = SlidingSum(), RepeatFilter(60.0)
    for i in range(20_000):
        tally.add(0.0, i, 1.0, 60.0)
        told.is_repeat(0.0, i)
    assert len(tally._entries) <= 4096 and len(told._said) <= 4096


def test_a_flood_is_counted() -> None:
    flood = AlarmRateLimit(most=20, within_s=60.0)
    passed = [flood.admit_alarm(i / 1000, NOISE) for i in range(5000)]
    assert sum(a is not None for a in passed) == 20
    assert flood.dropped == 4980
    hard = flood.admit_alarm(5.0, HARD)
    assert hard and hard.hard, "noise does not hide what matters"
    assert hard.reason == "has lost GPU 0 (4980 other alarms were left out)"
    later = flood.admit_alarm(70.0, NOISE)
    assert later and later.reason == NOISE.reason
