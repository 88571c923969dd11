"""One node and several controllers: none is listened to that another has taken over from."""

from holdfast.core.node import Carry, Clock, Heed, Intend, Linked, Told, Unlinked
from tests.core.test_node import leave, life, stop


def test_an_older_controller_is_not_listened_to() -> None:
    node = life(linked=False)
    assert node.step(0.0, Linked(3)) == (Heed(3),)
    assert node.step(1.0, Told(stop(1, 1), 2)) == ()
    assert node.step(1.0, Told(stop(1, 1), 3)) == (Carry(stop(1, 1)),)
    assert node.step(2.0, Told(stop(2, 1), 5)) == (Heed(5), Carry(stop(2, 1))), "a newer one may be heard first so"
    node.step(3.0, Unlinked())
    assert node.step(4.0, Linked(4)) == ()
    assert [type(deed) for deed in node.step(64.0, Clock())] == [Intend, Carry], "it is no controller to wait for"


def test_the_newest_controller_is_recalled() -> None:
    node = life(linked=False)
    node.recall((), 0, (), 0, epoch=4)
    assert node.step(0.0, Linked(3)) == ()
    assert node.step(0.0, Told(stop(1, 1), 3)) == ()
    assert node.step(0.0, Linked(4)) == ()
    assert node.step(0.0, Told(stop(1, 1), 4)) == (Carry(stop(1, 1)),)
    assert node.step(0.0, Told(leave(0))) == (Intend(leave(0)), Carry(leave(0))), "somebody on this host"
