"""A fence stands until its nodes are known to be empty, or until their time is over; who may end it is told apart."""

from holdfast.core.agent_state_machine import AgentProtocol, ClockTick, LinkLost, LinkOpened, NodeLimits, fence_s
from holdfast.core.decide.launch_fence import Fence
from holdfast.model.action import Dismiss, Say


def dismiss(id: int, node: str) -> Dismiss:
    return Dismiss(id=id, node=node, reason="evicted")


def test_it_falls_with_the_last_of_its_nodes() -> None:
    fence = Fence(100.0)
    assert fence.raise_fence(10.0, ("b", "a")) == []
    assert fence.blocks_launch(10.0) and fence.until == 110.0
    assert fence.describe_wait(20.0) == (
        "waiting out 90 s until the ranks on a, b, which did not answer, have ended themselves"
    )
    assert not fence.note_empty("a") and fence.blocks_launch(109.9)
    assert not fence.note_empty("a")
    assert fence.note_empty("b")
    assert not fence.blocks_launch(10.0) and fence.until == 0.0
    assert not fence.note_empty("b")  # it does not fall twice


def test_it_falls_in_time() -> None:
    fence = Fence(100.0)
    fence.raise_fence(10.0, ("a",))
    fence.watch_dismissals([dismiss(1, "a")])
    assert not fence.blocks_launch(110.0)
    assert fence.nodes == set() and not fence.awaits_outcome(1)


def test_it_follows_what_the_fleet_ends() -> None:
    fence = Fence(100.0)
    fence.watch_dismissals([dismiss(1, "a")])
    assert not fence.awaits_outcome(1)  # it does not stand
    fence.raise_fence(10.0, ("a", "b"))
    fence.watch_dismissals([dismiss(2, "a"), dismiss(3, "c"), Say(text="x"), dismiss(4, "b")])
    assert [fence.awaits_outcome(id) for id in (2, 3, 4)] == [True, False, True]
    assert fence.on_dismissed(11.0, 2, "") == ("a is gone", [])
    reason, told = fence.on_dismissed(12.0, 4, "no such machine")
    assert reason.startswith("b ") and reason.endswith(": no such machine")
    assert isinstance(told[0], Say) and "holdfast evict" in told[0].text and "98 s" in told[0].text
    assert fence.blocks_launch(12.0) and fence.nodes == {"b"}


def test_where_nobody_can_end_a_node_from_outside_only_time_helps_and_a_person_is_told() -> None:
    fence = Fence(100.0, fleet_ends=False)
    (told,) = fence.raise_fence(10.0, ("a",))
    assert isinstance(told, Say) and told.text.startswith(fence.describe_wait(10.0))
    fence.watch_dismissals([dismiss(2, "a")])
    assert not fence.awaits_outcome(2) and fence.blocks_launch(11.0)


def test_old_journals_know_of_none() -> None:
    fence = Fence()
    assert fence.raise_fence(10.0, ("a",)) == []
    assert not fence.blocks_launch(10.0)


def test_it_outlasts_the_ranks_of_a_node_that_is_cut_off() -> None:
    """The worst that links can do: the node is heard last at 0, hears us for as long as our end of the link lasts, and
    then takes as long to notice."""
    limits = NodeLimits(lost_s=60.0)
    node = AgentProtocol("n0", limits, 0.0)
    node.step(0.0, LinkOpened())
    noticed_s = 30.0 + 30.0  # aiohttp asks after 20 s, and waits for 10
    node.step(noticed_s, LinkLost())
    assert node.step(noticed_s + 59.9, ClockTick()) == ()
    assert node.step(noticed_s + 60.0, ClockTick())
    assert fence_s(limits) > noticed_s + 60.0 + 5.0  # and it has to end them
