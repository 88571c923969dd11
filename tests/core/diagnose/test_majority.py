"""What counts as faulty in a replay."""

from holdfast.core.replay.majority import GroupResult, ReplayMajority

SAME = GroupResult(marks={(1, 0): 5, (2, 0): 6})
OTHER = GroupResult(marks={(1, 0): 5, (2, 0): 7})


def test_who_differs_from_most_is_faulty() -> None:
    assert ReplayMajority().judge_wave({"a": SAME, "b": OTHER, "c": SAME}) == {"a": False, "b": True, "c": False}


def test_crash_and_nan() -> None:
    told = {"a": SAME, "b": GroupResult(failed=True, marks=OTHER.marks), "c": GroupResult(bad_step=2), "d": SAME}
    assert ReplayMajority().judge_wave(told) == {"a": False, "b": True, "c": True, "d": False}
    assert ReplayMajority().judge_wave({"a": OTHER, "b": GroupResult(failed=True, marks=SAME.marks)}) == {
        "a": False,
        "b": True,
    }


def test_without_a_majority_nobody_can_say() -> None:
    alike = ReplayMajority()
    assert alike.judge_wave({"a": SAME, "b": OTHER}) == {"a": None, "b": None}
    assert alike.judge_wave({"a": SAME, "b": SAME}) == {"a": False, "b": False}, "it did the same work in every repeat"
    assert alike.judge_wave({"c": OTHER}) == {"c": True}


def test_a_group_alone_is_judged_by_those_before() -> None:
    alike = ReplayMajority()
    alike.judge_wave({"a": SAME, "b": SAME, "c": SAME})
    assert alike.judge_wave({"r": OTHER}) == {"r": True}
    assert alike.judge_wave({"r": SAME}) == {"r": False}


def test_work_that_follows_from_no_seed_is_not_compared() -> None:
    alike = ReplayMajority(comparable=False)
    assert alike.judge_wave({"a": SAME, "b": OTHER, "c": SAME}) == {"a": False, "b": False, "c": False}
    assert alike.judge_wave({"a": GroupResult(failed=True)}) == {"a": True}


def test_cut_short() -> None:
    told = {
        "a": SAME,
        "b": SAME,
        "c": GroupResult(ended=False, marks={(1, 0): 5}),
        "d": GroupResult(ended=False, marks={(1, 0): 9}),
    }
    assert ReplayMajority().judge_wave(told) == {"a": False, "b": False, "c": None, "d": True}


def test_ranks_are_compared_each_with_its_own_kind() -> None:
    two = GroupResult(marks={(1, 0): 5, (1, 1): 8})
    wrong = GroupResult(marks={(1, 0): 5, (1, 1): 5})
    assert ReplayMajority().judge_wave({"a": two, "b": two, "c": wrong}) == {"a": False, "b": False, "c": True}
