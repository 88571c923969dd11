"""What is said of a node: an alarm that says that something is over takes back what was said."""

from holdfast.core.record.node_history import NodeHistory
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.journal_entry import Decision, Entry


def told(*alarms: Alarm) -> tuple[str, int]:
    history = NodeHistory()
    for seq, alarm in enumerate(alarms, 1):
        history.add(Entry(seq=seq, at=alarm.at, event=alarm, decision=Decision()))
    story = history.nodes["n0"]
    return story.last, story.alarms


def said(reason: str, signature: str, *, over: bool = False) -> Alarm:
    return Alarm(
        kind=Kind.HEALTH, at=1.0, suspects=("n0",), reason=reason, signature=signature, stance=Stance.NOTIFY, over=over
    )


FULL = said("has hardly any room left at /x", "disk.free /x")
ROOM = said("has room again at /x", "disk.free /x", over=True)
HOT = said("is hot", "gpu.temperature GPU 0")


def test_what_is_over_is_said_no_more() -> None:
    assert told(FULL) == (FULL.reason, 1)
    assert told(FULL, ROOM) == ("", 1)
    assert told(FULL, HOT, ROOM) == (HOT.reason, 2), "it takes back nothing else"
    assert told(FULL, said("has room again at /y", "disk.free /y", over=True)) == (FULL.reason, 1)
    assert told(FULL, ROOM, FULL) == (FULL.reason, 2)
