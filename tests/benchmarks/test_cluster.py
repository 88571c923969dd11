"""What the cluster benchmark makes of its trials."""

from collections.abc import Mapping, Sequence

from benchmarks.cluster import OURS, REQUEUE, SPARE, WITHOUT, Trial, judge


def trials(seconds: Mapping[str, Sequence[float | None]]) -> dict[str, list[Trial]]:
    return {
        name: [Trial(stepping_s=one, whole_s=one, lost_steps=None if one is None else 3) for one in times]
        for name, times in seconds.items()
    }


def test_ways_are_compared_as_ratios_in_one_run() -> None:
    found = judge(trials({OURS: [4.0, 6.0], WITHOUT: [20.0, 30.0], SPARE: [12.0, 8.0], REQUEUE: [60.0, 50.0]}), {})
    assert found.figures[f"{OURS}_s"] == 5.0 and found.figures[f"{REQUEUE}_ratio"] == 11.0
    assert found.figures[f"{OURS}_lost_steps"] == 3
    assert found.goals == {"standby_10x_requeue": True, "standby_ahead_of_spare": True}


def test_who_never_comes_back_is_behind_and_we_are_not_ahead_if_we_do_not() -> None:
    behind = judge(trials({OURS: [4.0], WITHOUT: [20.0], SPARE: [None], REQUEUE: [30.0]}), {})
    assert behind.goals == {"standby_10x_requeue": False, "standby_ahead_of_spare": True}
    lost = judge(trials({OURS: [None], WITHOUT: [20.0], SPARE: [None], REQUEUE: [30.0]}), {})
    assert lost.figures[f"{REQUEUE}_ratio"] is None and not any(lost.goals.values())


def test_without_slurm_nothing_is_claimed() -> None:
    found = judge({}, {"all": "no slurmd here"})
    assert found.skipped and not found.goals
