"""What is known of nodes, and when it is forgotten."""

import msgspec
import pytest

from holdfast.controller.node_links import NodeLinks
from holdfast.controller.node_registry import NodeRegistry
from holdfast.core.decide.decider import Decider
from holdfast.core.detect.silence import SilenceLimits
from holdfast.model.decider_events import Begin, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job
from holdfast.model.observation import Beat
from holdfast.model.state_copy import Copy
from holdfast.model.stored_checkpoint_report import MissedCheckpoint, StorageReport
from holdfast.wire.agent_messages import Hello

JOB = Job(run_id="r", min_nodes=2, max_nodes=2, can_acquire=False)
HELLO = Hello(node="a", host="h", nproc=1, order=0, generation=0, ready=True, keeper=("h", 5))


def held(*steps: int) -> tuple[Copy, ...]:
    return tuple(Copy(rank=0, step=step, node="a", layout="l", world=2, whole=True) for step in steps)


def begun(job: Job = JOB) -> tuple[NodeRegistry, Decider]:
    decider = Decider()
    decider.step(0.0, Begin(job=job, limits=Limits()))
    return NodeRegistry(SilenceLimits(beat_s=1.0, silence_s=3.0), decider.view, NodeLinks(lambda: 1)), decider


def test_copies_are_believed_of_seated_nodes_alone() -> None:
    registry, decider = begun()
    hello = msgspec.structs.replace(HELLO, copies=held(7))
    registry.record_hello(0.0, hello)
    assert registry.copies == {} and (registry.hosts["a"], registry.keepers["a"]) == ("h", ("h", 5))
    for node in ("a", "b"):
        decider.step(1.0, Ready(node=node, host="h", nproc=1))
    registry.record_hello(1.0, hello)
    assert registry.is_seated("a") and registry.copies == {"a": held(7)}


def test_a_silent_node_holds_nothing_any_more() -> None:
    registry, _ = begun()
    registry.record_alive(0.0, "a")
    registry.record_copies("a", held(9))
    registry.record_beat(0.0, Beat(node="a", generation=0, step=9, at=0.0))
    [alarm] = registry.overdue_alarms(4.0)
    assert alarm.suspects == ("a",)
    registry.record_silence("a")
    assert registry.copies == {} and registry.beats == {}


def test_a_checkpoint_has_the_time_of_its_writer_where_that_is_known() -> None:
    registry, _ = begun()
    beat = Beat(node="a", generation=0, step=9, at=0.0)
    for now, step, written in ((20.0, 5, 12.0), (30.0, 6, 0.0), (40.0, 7, 99.0)):
        registry.record_beat(now, msgspec.structs.replace(beat, stored=step, stored_at=written))
        stored = registry.storage.newest
        assert stored and (stored.step, stored.at) == (step, 12.0 if step == 5 else now)


def test_what_could_not_be_written_before_a_restore_from_storage_is_no_longer_missed() -> None:
    registry, decider = begun()
    for node in ("a", "b"):
        decider.step(1.0, Ready(node=node, host="h", nproc=1))
    assert decider.view.generation == 1 and registry.owns_rank("a", 0)
    missed = MissedCheckpoint(step=30, why="it is full")
    registry.storage.continue_from(StorageReport(step=20, at=0.5, missed=missed))
    restored = Beat(node="b", generation=1, step=21, at=2.0, restored=20)
    registry.record_beat(2.0, restored)  # its keeper publishes nothing
    assert registry.storage.newest == StorageReport(step=20, at=0.5, missed=missed)
    registry.record_beat(2.0, msgspec.structs.replace(restored, node="a"))
    assert registry.storage.newest == StorageReport(step=20, at=0.5)


def test_the_silence_of_a_node_that_was_told_to_leave_is_no_news() -> None:
    registry, _ = begun()
    registry.record_hello(0.0, HELLO)
    registry.record_departure("a")
    registry.record_alive(0.5, "a")
    assert registry.overdue_alarms(10.0) == () and registry.keepers == {}
    registry.record_hello(10.0, HELLO)  # it comes back
    assert [len(registry.overdue_alarms(at)) for at in (11.0, 12.0, 13.0, 14.0)] == [0, 0, 1, 0]


def test_nobody_waits_for_a_node_that_was_told_to_leave_though_its_link_is_open() -> None:
    links = NodeLinks(lambda: 1)
    registry = NodeRegistry(SilenceLimits(), Decider().view, links)
    for node in ("a", "b"):
        links.open_link(node, links.make_outbox())
    registry.record_departure("a")
    assert registry.present_nodes() == ("b",)
    registry.record_hello(1.0, HELLO)  # it comes back
    assert registry.present_nodes() == ("a", "b")


def test_copies_of_a_line_that_the_job_leaves_are_forgotten() -> None:
    registry, _ = begun()
    registry.record_copies("a", held(8, 9, 10))
    registry.record_copies("b", held(9))
    registry.drop_copies_after(9)
    assert registry.copies == {"a": held(8, 9), "b": held(9)}
    registry.keep_copies_on({"b"})
    assert registry.copies == {"b": held(9)}


def test_nodes_of_one_host_may_accuse_each_other_and_nobody_else_may() -> None:
    registry, _ = begun()
    for node in ("a", "b"):
        registry.record_origin(node, local=True)
    registry.record_origin("far", local=False)
    assert registry.may_accuse("a", ("a", "b")) and registry.may_accuse("far", ("far",))
    assert not registry.may_accuse("a", ("far",)) and not registry.may_accuse("far", ("a",))
    registry.record_origin("b", local=False)  # it called again, from elsewhere
    assert not registry.may_accuse("a", ("a", "b"))


def test_states_on_disk_are_believed_of_nodes_that_wait_for_a_seat() -> None:
    """After a loss of power all nodes are new, and each state on disk tells of which line it is."""
    registry, _ = begun()
    disk = msgspec.structs.replace(held(5)[0], disk=True, generation=1)
    registry.record_hello(0.0, msgspec.structs.replace(HELLO, copies=(*held(7), disk)))
    assert registry.copies == {"a": (disk,)}


def test_ranks_beside_a_node_are_those_of_others_on_its_host_that_are_there() -> None:
    registry, decider = begun(msgspec.structs.replace(JOB, min_nodes=4, max_nodes=4))
    for node, host in zip("abcd", "hhhi", strict=True):
        decider.step(1.0, Ready(node=node, host=host, nproc=2))
        if node != "c":  # which has not called since this controller is there: it may be anywhere
            registry.record_hello(1.0, msgspec.structs.replace(HELLO, node=node, host=host))
    assert registry.ranks_beside("a") == (2, 3, 4, 5)
    assert registry.ranks_beside("d") == (4, 5)
    assert registry.ranks_beside("standby") == (4, 5)


@pytest.mark.parametrize(("alone_since", "lost_at"), [(0.0, 108.0), (99.0, 108.0), (90.0, 105.0)])
def test_nodes_that_have_looked_for_a_controller_for_long_are_lost_sooner(alone_since: float, lost_at: float) -> None:
    registry, _ = begun()
    registry.expect_nodes(100.0, ("a", "b"), alone_since)
    registry.record_alive(lost_at - 1, "b")
    assert not registry.overdue_alarms(lost_at - 0.1)
    assert [alarm.suspects for alarm in registry.overdue_alarms(lost_at)] == [("a",)]
