"""A node without the ranks that it should have is named once, when nobody can have told of their end any more."""

from holdfast.core.detect.vanished_ranks import MissingRanksDetector
from holdfast.model.detector_alarm import Kind
from holdfast.model.observation import Beat


def beat(running: int, *, generation: int = 2, node: str = "a") -> Beat:
    return Beat(node=node, generation=generation, step=7, at=0.0, running=running)


def test_it_is_named_once_and_dated_when_it_was_seen() -> None:
    deserted = MissingRanksDetector()
    assert deserted.on_beat(1.0, 2, beat(1)) is None
    assert deserted.on_beat(2.0, 2, beat(0)) is None
    assert deserted.on_beat(11.9, 2, beat(0)) is None
    alarm = deserted.on_beat(12.0, 2, beat(0))
    assert alarm is not None
    assert (alarm.kind, alarm.suspects, alarm.generation, alarm.at) == (Kind.CRASH, ("a",), 2, 2.0)
    assert deserted.on_beat(100.0, 2, beat(0)) is None
    assert deserted.on_beat(100.0, 3, beat(0, generation=3)) is None
    assert deserted.on_beat(110.0, 3, beat(0, generation=3)) is not None, "another generation is another matter"


def test_ranks_that_run_are_the_end_of_it() -> None:
    deserted = MissingRanksDetector()
    assert deserted.on_beat(1.0, 2, beat(0)) is None
    assert deserted.on_beat(5.0, 2, beat(1)) is None
    assert deserted.on_beat(12.0, 2, beat(0)) is None
    assert deserted.on_beat(12.0, 2, beat(0, node="b")) is None
    assert deserted.on_beat(21.0, 2, beat(0)) is None


def test_who_does_not_say_or_is_of_another_generation_is_let_be() -> None:
    deserted = MissingRanksDetector()
    for now in (1.0, 50.0, 100.0):
        assert deserted.on_beat(now, 2, beat(-1)) is None
        assert deserted.on_beat(now, 2, beat(0, generation=1)) is None
