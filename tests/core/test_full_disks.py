"""A disk that was full is the cause of what came of it, and costs no node its place."""

import msgspec
import pytest

from holdfast.core.decide.decider import Decider
from holdfast.core.decide.incident_course import ENDED_FOR_ROOM
from holdfast.core.incident.first_cause import launch_alarm
from holdfast.core.incident.full_disks import FullDisks, blame_disk
from holdfast.core.record.solving_rungs import Rung, rung_of
from holdfast.model.action import Acquire, Launch
from holdfast.model.decider_events import Begin, Event, Outcome, Progress, Ready, Successor
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import MACHINE_LOST, Alarm, Kind, Stance
from holdfast.model.incident_record import Record, Remedy
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase

WHERE = "/runs/one"
FULL = Successor(epoch=2, alone_since=20.0, full_disk=WHERE, full_until=50.0)


def room_alarm(at: float, *nodes: str) -> Alarm:
    told = Alarm(kind=Kind.HEALTH, at=at, suspects=nodes, reason="has hardly any room left", klass="disk_full")
    return msgspec.structs.replace(told, signature=f"disk.free {WHERE}", stance=Stance.NOTIFY)


def gone(at: float, node: str, signature: str = "gone") -> Alarm:
    return Alarm(kind=Kind.SILENCE, at=at, suspects=(node,), reason="is gone, says its fleet", signature=signature)


def crash(at: float, **more: object) -> Alarm:
    plain = Alarm(
        kind=Kind.CRASH, at=at, suspects=("a",), ranks=(0,), code=1, generation=1, reason="exited with code 1"
    )
    return msgspec.structs.replace(plain, **more)


class Story:
    """A job of two nodes that trains from 4 s on; the fleet gives others."""

    def __init__(self) -> None:
        self.decider, self.records, self.actions = Decider(), list[Record](), list[object]()
        self.hear(0.0, Begin(job=Job(run_id="r", min_nodes=2, max_nodes=2), limits=Limits()))
        self.give(1.0, "a", "b")
        self.hear(3.0, Outcome(action=self.decider.view.awaited, ok=True))
        self.step(4.0, 7)

    def hear(self, now: float, event: Event) -> None:
        decision = self.decider.step(now, event)
        self.actions += decision.actions
        self.records += [decision.closed] if decision.closed else []

    def give(self, now: float, *nodes: str) -> None:
        for action in [one for one in self.actions if isinstance(one, Acquire)]:
            self.hear(now, Outcome(action=action.id, ok=True, nodes=nodes))
        self.actions.clear()
        for order, node in enumerate(nodes):
            self.hear(now, Ready(node=node, host=node, nproc=1, order=order))

    def step(self, now: float, step: int) -> None:
        view = self.decider.view
        self.hear(
            now, Progress(generation=view.generation, step=step, at=now, first_step=1, first_at=now, counted=False)
        )

    def stopped(self, now: float) -> None:
        self.hear(now, Outcome(action=self.decider.view.awaited, ok=True))


def test_nodes_that_ended_on_a_full_disk_are_replaced_and_not_evicted() -> None:
    story = Story()
    story.hear(60.0, FULL)
    for node in ("a", "b"):
        story.hear(61.0, gone(61.0, node))
    story.stopped(61.0)
    assert story.decider.view.phase is Phase.WAITING
    story.give(62.0, "c", "d")
    story.hear(63.0, Outcome(action=story.decider.view.awaited, ok=True))
    story.step(64.0, 8)
    [record] = story.records
    assert record.cause == f"the disk that holds {WHERE} was full: a and b are gone, says their fleet"
    assert (record.label, record.verdict.remedy) == ("full disk", Remedy.RESTART)
    assert record.verdict.reason == "no node is to blame for a full disk: others take the places of a, b"
    assert record.ordered == dict.fromkeys(("a", "b"), ENDED_FOR_ROOM), "which is no eviction"
    assert (record.evicted, record.admitted) == (("a", "b"), ("c", "d"))
    assert rung_of(record) is Rung.RESTART


def test_a_node_that_told_of_its_full_disk_minutes_before_it_fell_silent_is_not_to_blame() -> None:
    for told_at, remedy in ((20.0, Remedy.RESTART), (-700.0, Remedy.EVICT)):
        story = Story()
        story.hear(20.0, room_alarm(told_at, "a"))
        story.hear(61.0, gone(61.0, "a"))
        story.stopped(61.0)
        verdict = story.decider.view.verdict
        assert verdict and (verdict.remedy, verdict.nodes) == (remedy, ("a",))


def test_what_a_full_disk_does_not_explain_is_not_put_down_to_it() -> None:
    disks = FullDisks()
    disks.on_alarm(room_alarm(10.0, "a"))
    disks.on_alarm(crash(10.0, klass="disk_full", suspects=("c",)))  # no reading
    assert disks.explain(60.0, gone(60.0, "a")) == WHERE
    assert disks.explain(60.0, gone(60.0, "b")) == "" == disks.explain(60.0, gone(60.0, "c"))
    assert disks.explain(60.0, gone(60.0, "a", MACHINE_LOST)) == ""
    assert disks.explain(60.0, crash(60.0)) == WHERE, "it has left no words"
    assert disks.explain(60.0, crash(60.0, klass="disk_full", raised="OSError")) == WHERE
    for other in (crash(60.0, raised="KeyError"), crash(60.0, klass="gpu_oom"), crash(60.0, code=-9)):
        assert disks.explain(60.0, other) == "", other
    assert disks.explain(60.0, crash(60.0, code=-9, full_disk="/seen")) == "/seen", "the node saw that itself"
    disks.on_successor(FULL)
    assert disks.explain(70.0, gone(70.0, "b")) == WHERE, "all nodes write there"
    assert disks.explain(700.0, gone(700.0, "b")) == ""


def test_a_rank_that_left_no_words_on_a_full_disk_failed_for_want_of_room() -> None:
    blamed = blame_disk(crash(60.0), WHERE)
    assert (blamed.klass, blamed.group, blamed.action) == ("disk_full", "data_storage", "fix_config")
    assert WHERE in blamed.hint
    said = blame_disk(crash(60.0, klass="disk_full", confidence=0.9), WHERE)
    assert (said.confidence, said.full_disk) == (0.9, WHERE)


@pytest.mark.parametrize("words", ["[Errno 28] No space left on device: '/runs/one/logs'", "no memory"])
def test_a_launch_that_finds_no_room_waits_for_it_and_evicts_nobody(words: str) -> None:
    story = Story()
    story.hear(20.0, room_alarm(20.0, "a", "b"))
    story.hear(30.0, crash(30.0, code=-9, suspects=("a",)))
    story.stopped(31.0)
    [launch] = [one for one in story.actions if isinstance(one, Launch) and one.generation == 2]
    story.hear(32.0, Outcome(action=launch.id, ok=False, failed={"a": words}))
    story.stopped(33.0)
    verdict, is_full = story.decider.view.verdict, "No space" in words
    assert verdict and verdict.remedy is (Remedy.RESTART if is_full else Remedy.EVICT)
    alarm = launch_alarm(32.0, Outcome(action=1, ok=False, failed={"a": words}), 2, ())
    assert (alarm.klass == "disk_full") is is_full
    if is_full:
        assert (
            verdict.reason == "waiting for room on the disk: restarted in place after 10 s" and verdict.wait_s == 10.0
        )


def test_that_there_is_room_again_makes_no_disk_full() -> None:
    disks = FullDisks()
    disks.on_alarm(msgspec.structs.replace(room_alarm(10.0, "a"), over=True))
    assert disks.explain(20.0, crash(20.0)) == ""
    disks.on_alarm(room_alarm(30.0, "a"))
    disks.on_alarm(msgspec.structs.replace(room_alarm(40.0, "a"), over=True))
    assert disks.explain(50.0, crash(50.0)) == WHERE, "it was full lately"


def test_a_disk_that_was_seen_full_makes_a_guess_sure() -> None:
    guess = crash(60.0, klass="disk_full", confidence=0.55, title="perhaps", hint="torch does not say why")
    found = blame_disk(guess, WHERE)
    assert (found.confidence, found.full_disk) == (0.8, WHERE) and WHERE in found.hint
    waits = launch_alarm(60.0, Outcome(action=1, ok=False, detail="No space left on device"), 1, ())
    assert blame_disk(waits, WHERE).action == "wait_external" and blame_disk(waits, WHERE).confidence == 1.0
