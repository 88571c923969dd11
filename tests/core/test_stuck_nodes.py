"""Nodes that have a machine and do not start: why is told at once, when they are given back, and at the end."""

from holdfast.core.membership.standbys import RETRY_S
from holdfast.model.action import Dismiss, Finish
from holdfast.model.decider_events import Tick
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from holdfast.model.job_phase import Phase
from tests.core.test_fleet_news import LIMITS, Play


def starting(reason: str = "") -> FleetNode:
    return FleetNode(state=FleetState.STARTING, reason=reason)


def test_why_a_node_with_a_machine_does_not_start_is_told_once_and_again_when_it_is_given_back() -> None:
    play = Play(standbys=1)
    play.train(1.0, "a", "b", "c")
    play.survey(5.0, c=FleetNode(state=FleetState.GONE, reason="Evicted"))
    play.tick_until(5.0 + RETRY_S)
    play.give(20.0, "d")
    play.survey(21.0, d=starting())
    assert play.said() == [], "it has only not started yet"
    play.survey(22.0, d=starting("ErrImagePull: no route"))
    assert play.said() == ["d does not start: ErrImagePull: no route"]
    play.survey(23.0, d=starting("ImagePullBackOff: Back-off"))
    assert play.said() == [], "clusters change their words with every try"
    while not any(isinstance(action, Dismiss) for action in play.actions):
        assert play.wake_at is not None and play.wake_at <= 20.0 + LIMITS.ready_s + 5.0
        play.hear(play.wake_at, Tick())
    assert play.said() == ["d given back, as not ready within 100 s: ImagePullBackOff: Back-off"]


def test_a_job_that_gives_up_for_want_of_nodes_names_why_they_do_not_start() -> None:
    play = Play()
    play.give(1.0, "a", "b")
    play.survey(2.0, a=starting("ErrImagePull: no x:1"), b=starting("ErrImagePull: no x:1"))
    assert play.said() == ["a, b do not start: ErrImagePull: no x:1"]
    wait = play.view.node_wait(3.0)
    why = "ErrImagePull: no x:1"
    assert wait is not None and why in wait.describe(3.0)
    play.tick_until(601.0)
    assert play.phase() is Phase.ENDING
    finish = play.only(Finish)
    assert isinstance(finish, Finish) and why in finish.reason


def test_an_end_that_is_known_is_not_why_a_node_does_not_start() -> None:
    play = Play()
    play.give(1.0, "a", "b")
    play.survey(2.0, a=FleetNode(state=FleetState.STARTING, reason="reservation maint ends", ends_at=9e3))
    assert play.said() == []
