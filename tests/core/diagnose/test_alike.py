"""What counts as faulty in a replay."""

from holdfast.core.diagnose.alike import Alike, Told

SAME = Told(marks={(1, 0): 5, (2, 0): 6})
OTHER = Told(marks={(1, 0): 5, (2, 0): 7})


def test_who_differs_from_most_is_faulty() -> None:
    assert Alike().heard({"a": SAME, "b": OTHER, "c": SAME}) == {"a": False, "b": True, "c": False}


def test_crash_and_nan() -> None:
    told = {"a": SAME, "b": Told(failed=True, marks=OTHER.marks), "c": Told(bad_step=2), "d": SAME}
    assert Alike().heard(told) == {"a": False, "b": True, "c": True, "d": False}
    assert Alike().heard({"a": OTHER, "b": Told(failed=True, marks=SAME.marks)}) == {"a": False, "b": True}


def test_without_a_majority_nobody_can_say() -> None:
    alike = Alike()
    assert alike.heard({"a": SAME, "b": OTHER}) == {"a": None, "b": None}
    assert alike.heard({"a": SAME, "b": SAME}) == {"a": False, "b": False}, "it did the same work in every repeat"
    assert alike.heard({"c": OTHER}) == {"c": True}


def test_a_group_alone_is_judged_by_those_before() -> None:
    alike = Alike()
    alike.heard({"a": SAME, "b": SAME, "c": SAME})
    assert alike.heard({"r": OTHER}) == {"r": True}
    assert alike.heard({"r": SAME}) == {"r": False}


def test_work_that_follows_from_no_seed_is_not_compared() -> None:
    alike = Alike(comparable=False)
    assert alike.heard({"a": SAME, "b": OTHER, "c": SAME}) == {"a": False, "b": False, "c": False}
    assert alike.heard({"a": Told(failed=True)}) == {"a": True}


def test_cut_short() -> None:
    told = {"a": SAME, "b": SAME, "c": Told(ended=False, marks={(1, 0): 5}), "d": Told(ended=False, marks={(1, 0): 9})}
    assert Alike().heard(told) == {"a": False, "b": False, "c": None, "d": True}


def test_ranks_are_compared_each_with_its_own_kind() -> None:
    two = Told(marks={(1, 0): 5, (1, 1): 8})
    wrong = Told(marks={(1, 0): 5, (1, 1): 5})
    assert Alike().heard({"a": two, "b": two, "c": wrong}) == {"a": False, "b": False, "c": True}
