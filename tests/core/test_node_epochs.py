"""One node and several controllers: none is listened to that another has taken over from."""

from holdfast.core.agent_state_machine import (
    CarryOut,
    ClockTick,
    ErrandReceived,
    HeedEpoch,
    LinkLost,
    LinkOpened,
    RememberLeaving,
)
from tests.core.test_agent_state_machine import leave, life, stop


def test_an_older_controller_is_not_listened_to() -> None:
    node = life(linked=False)
    assert node.step(0.0, LinkOpened(3)) == (HeedEpoch(3),)
    assert node.step(1.0, ErrandReceived(stop(1, 1), 2)) == ()
    assert node.step(1.0, ErrandReceived(stop(1, 1), 3)) == (CarryOut(stop(1, 1)),)
    assert node.step(2.0, ErrandReceived(stop(2, 1), 5)) == (HeedEpoch(5), CarryOut(stop(2, 1))), (
        "a newer one may be heard first so"
    )
    node.step(3.0, LinkLost())
    assert node.step(4.0, LinkOpened(4)) == ()
    assert [type(deed) for deed in node.step(64.0, ClockTick())] == [RememberLeaving, CarryOut], (
        "it is no controller to wait for"
    )


def test_the_newest_controller_is_recalled() -> None:
    node = life(linked=False)
    node.restore_state((), 0, (), 0, epoch=4)
    assert node.step(0.0, LinkOpened(3)) == ()
    assert node.step(0.0, ErrandReceived(stop(1, 1), 3)) == ()
    assert node.step(0.0, LinkOpened(4)) == ()
    assert node.step(0.0, ErrandReceived(stop(1, 1), 4)) == (CarryOut(stop(1, 1)),)
    assert node.step(0.0, ErrandReceived(leave(0))) == (RememberLeaving(leave(0)), CarryOut(leave(0))), (
        "somebody on this host"
    )
