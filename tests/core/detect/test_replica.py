"""Who is named when replicas differ, who is not, and what is known to be good."""

import pytest

from holdfast.core.detect.replica import ReplicaDetector, ReplicaLimits, hash_stride
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.observation import Mark


def replicas(limits: ReplicaLimits | None = None) -> ReplicaDetector:
    made = ReplicaDetector(limits or ReplicaLimits())
    made.on_launch(1)
    return made


def hear(made: ReplicaDetector, step: int, values: list[int], part: str = "parameters", count: int = 0) -> list[Alarm]:
    """Rank i is on node ni."""
    found = []
    for rank, value in enumerate(values):
        mark = Mark(rank, step, "g", count or len(values), part, value)
        found += made.on_marks(100.0, f"n{rank}", 1, (mark,))
    return found


def test_equal_replicas_are_no_news_but_good_to_know() -> None:
    made = replicas()
    assert made.newest_equal_step() == -1
    assert hear(made, 10, [7, 7, 7, 7]) == []
    assert made.newest_equal_step() == 10


def test_a_majority_names_who_differs() -> None:
    made = replicas()
    hear(made, 10, [7, 7, 7, 7])
    [alarm] = hear(made, 20, [8, 8, 9, 8])
    assert (alarm.kind, alarm.suspects, alarm.ranks) == (Kind.REPLICA, ("n2",), (2,))
    assert (alarm.hard, alarm.not_after, alarm.stance) == (True, 10, Stance.ACT)
    assert " 3 of its 4 " in alarm.reason and " step 20" in alarm.reason
    assert made.newest_equal_step() == 10


def test_it_is_named_as_soon_as_a_majority_has_spoken() -> None:
    made = replicas()
    hear(made, 10, [7] * 5)
    [alarm] = hear(made, 20, [9, 8, 8, 8], count=5)
    assert alarm.ranks == (0,) and alarm.hard


def test_half_is_no_majority() -> None:
    made = replicas()
    hear(made, 10, [7, 7, 7, 7])
    assert hear(made, 20, [8, 8, 9], count=4) == [], "the fourth may side with either"
    [alarm] = made.on_marks(100.0, "n3", 1, (Mark(3, 20, "g", 4, "parameters", 9),))
    assert not alarm.hard and alarm.ranks == (0, 1, 2, 3)


def test_of_two_nobody_is_named() -> None:
    made = replicas()
    hear(made, 10, [7, 7])
    [alarm] = hear(made, 20, [7, 8])
    assert (alarm.hard, alarm.suspects, alarm.not_after) == (False, ("n0", "n1"), 10)


def test_who_was_named_is_not_named_again() -> None:
    made = replicas()
    hear(made, 10, [7, 7, 7])
    assert len(hear(made, 20, [7, 7, 8])) == 1
    assert hear(made, 30, [7, 7, 8]) == []
    assert len(hear(made, 40, [5, 7, 7])) == 1


def test_what_never_was_equal_is_told_and_not_acted_on() -> None:
    made = replicas()
    [alarm] = hear(made, 10, [1, 1, 2])
    assert (alarm.stance, alarm.hard, alarm.not_after) == (Stance.NOTIFY, False, None)
    assert made.newest_equal_step() is None, "it cannot tell good from bad, so nobody waits for it"


def test_the_oldest_of_all_parts_is_what_is_known() -> None:
    made = replicas()
    hear(made, 10, [7, 7, 7])
    hear(made, 10, [1, 1, 1], part="optimizer state")
    hear(made, 20, [7, 7, 7])
    assert made.newest_equal_step() == 10
    [alarm] = hear(made, 20, [1, 2, 1], part="optimizer state")
    assert alarm.not_after == 10 and "optimizer state" in alarm.reason


def test_a_generation_that_is_over_says_nothing() -> None:
    made = replicas()
    hear(made, 10, [7, 7, 7])
    made.on_launch(2)
    assert hear(made, 20, [7, 8, 7]) == [] and made.newest_equal_step() == -1


def test_marks_that_are_never_completed_are_let_go() -> None:
    made = replicas()
    for step in range(1000):
        hear(made, step, [7], count=2)
    assert all(len(stream.steps) <= 65 for stream in made._streams.values())


def test_stance_caps_what_it_is_for() -> None:
    made = replicas(ReplicaLimits(stance=Stance.OBSERVE))
    hear(made, 10, [7, 7, 7])
    assert [alarm.stance for alarm in hear(made, 20, [7, 8, 7])] == [Stance.OBSERVE]


@pytest.mark.parametrize(("cost_s", "every"), [(0.0, 10), (0.002, 10), (0.004, 20), (0.1, 640)])
def test_what_costs_more_is_done_less_often_at_steps_that_others_share(cost_s: float, every: int) -> None:
    assert hash_stride(ReplicaLimits(every=10, share=0.003), cost_s, 0.1) == every
