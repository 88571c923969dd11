"""A node that knows nothing of what was launched on it is named once, and nobody else is."""

from holdfast.core.detect.rebooted_node import RebootDetector
from holdfast.model.detector_alarm import Kind
from holdfast.model.observation import Beat


def beat(node: str, generation: int) -> Beat:
    return Beat(node=node, generation=generation, step=-1, at=0.0)


def test_a_node_that_was_started_anew_is_named_once() -> None:
    reborn = RebootDetector()
    assert reborn.on_beat(1.0, 2, beat("a", 2)) is None
    alarm = reborn.on_beat(2.0, 2, beat("b", 0))
    assert alarm is not None
    assert (alarm.kind, alarm.suspects, alarm.generation, alarm.at) == (Kind.CRASH, ("b",), 2, 2.0)
    assert reborn.on_beat(3.0, 2, beat("b", 0)) is None
    assert reborn.on_beat(4.0, 3, beat("b", 2)) is not None, "another generation is another matter"
