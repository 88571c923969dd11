"""The wait for links has an end, whoever comes back."""

from holdfast.core.membership.awaited_network_links import LostLinks


def test_it_ends_when_all_are_back() -> None:
    links = LostLinks()
    links.begin_wait(10.0, ("a", "b"), 600.0)
    assert links.blocks_launch(20.0, {"a", "c"}) and not links.blocks_launch(20.0, {"c"})
    assert links.on_back(30.0, ("a", "c")) == ["a"] and links.until == 120.0
    assert links.on_back(40.0, ("b",)) == ["b"]
    assert not links.blocks_launch(41.0, {"a", "b"}) and links.until == 0.0 and links.take_late(1e9) == set()


def test_whoever_is_late_is_told_once() -> None:
    links = LostLinks()
    links.begin_wait(10.0, ("a", "b"), 600.0)
    links.begin_wait(500.0, ("c",), 600.0)
    assert links.until == 610.0, "one that is lost later does not prolong the wait"
    assert links.take_late(609.0) == set()
    assert not links.blocks_launch(610.0, {"a"})
    assert links.take_late(610.0) == {"a", "b", "c"} and links.take_late(611.0) == set()


def test_some_that_are_back_do_not_prolong_it() -> None:
    links = LostLinks()
    links.begin_wait(0.0, ("a", "b"), 60.0)
    links.on_back(50.0, ("a",))
    assert links.until == 60.0
