"""What outlives agents: errands, behind a torn line too, and since when there is no controller."""

import os
from pathlib import Path

import msgspec
from msgspec.structs import replace

from holdfast.agent.agent_state_files import AgentStateFiles
from holdfast.core.agent_state_machine import HeedEpoch, RememberDone, RememberLeaving
from holdfast.model.node_errands import Done, Leave
from holdfast.model.observation import Beat, Departure

LEAVE = Leave(id=0, code=1, grace_s=2.0, reason="no controller for 60 s")


def test_what_was_carried_out_is_remembered_even_behind_a_torn_line(tmp_path: Path) -> None:
    notes = AgentStateFiles(tmp_path)
    assert notes.read_done() == ()
    first, second = Done(id=1, node="n0", ok=True), Done(id=2, node="n0", ok=False, detail="no")
    notes.write_deed(RememberDone(first))
    with (tmp_path / "done.jsonl").open("ab") as file:
        file.write(b'\n{"type":"done","id":7,"no')  # the agent died in the middle of it
    notes.write_deed(RememberDone(second))
    assert AgentStateFiles(tmp_path).read_done() == (first, second)


def test_the_next_agent_counts_on_from_when_the_controller_was_lost(tmp_path: Path) -> None:
    assert AgentStateFiles(tmp_path).mark_alone(50.0) == 50.0
    notes = AgentStateFiles(tmp_path)
    assert notes.mark_alone(60.0) == 50.0  # dials that fail, and agents that are started anew
    notes.clear_alone()
    notes.clear_alone()
    assert notes.mark_alone(70.0) == 70.0


def test_a_disk_that_takes_no_writes_does_not_matter_to_that(tmp_path: Path) -> None:
    """The holder has made a place for it in its memory, at a time when the disk took writes."""
    kept = os.memfd_create("alone")
    AgentStateFiles(tmp_path).reset_notes(f"/proc/{os.getpid()}/fd/{kept}")
    notes = AgentStateFiles(tmp_path)
    tmp_path.chmod(0o500)  # nor does a user who may write everywhere make a file there
    before = list(tmp_path.iterdir())
    assert notes.mark_alone(50.0) == 50.0 and AgentStateFiles(tmp_path).mark_alone(60.0) == 50.0
    notes.clear_alone()
    assert notes.mark_alone(70.0) == 70.0 and AgentStateFiles(tmp_path).mark_alone(80.0) == 70.0
    assert list(tmp_path.iterdir()) == before
    tmp_path.chmod(0o700)
    os.close(kept)
    assert notes.mark_alone(90.0) == 90.0, "the holder is gone, and the node with it"
    other = os.open(tmp_path / "another's", os.O_CREAT | os.O_WRONLY)
    os.write(other, b"precious")
    os.dup2(other, kept)  # the number serves something else by now
    notes.clear_alone()
    assert (tmp_path / "another's").read_bytes() == b"precious"
    for number in {other, kept}:
        os.close(number)


def test_what_cannot_be_read_counts_from_now(tmp_path: Path) -> None:
    notes = AgentStateFiles(tmp_path)
    (tmp_path / "alone").write_text("torn")
    assert notes.mark_alone(50.0) == 50.0
    (tmp_path / "alone").write_text("1000050.0\n")  # of a machine that has been started anew since
    assert notes.mark_alone(50.0) == 50.0
    assert AgentStateFiles(tmp_path / "nowhere").mark_alone(50.0) == 50.0


def test_who_was_about_to_leave_is_known_to_the_next_agent_not_to_the_next_holder(tmp_path: Path) -> None:
    notes = AgentStateFiles(tmp_path)
    assert notes.read_leave_intent() is None
    notes.write_deed(RememberLeaving(LEAVE))
    notes.clear_alone()  # a controller that is back changes nothing: ranks may have been ended
    assert notes.read_leave_intent() == LEAVE
    notes.reset_notes("/nowhere")
    assert notes.read_leave_intent() is None
    (tmp_path / "leaving.json").write_bytes(b"{")
    assert notes.read_leave_intent() is None


def test_what_a_node_stored_after_its_departure_is_added_to_what_the_first_agent_wrote(tmp_path: Path) -> None:
    notes = AgentStateFiles(tmp_path)
    notes.complete_departure(lambda beat: replace(beat, stored=9))
    beat = Beat(node="n0", generation=1, step=9, at=5.0)
    left = Departure(node="n0", generation=1, at=6.0, reason="alone", ended=False, beat=beat)
    notes.write_departure(left)
    notes.write_departure(replace(left, ended=True))  # of an agent that finds ranks ended by the first
    notes.complete_departure(lambda beat: replace(beat, stored=9, stored_at=7.0))
    told = msgspec.json.decode((tmp_path / "departure.json").read_bytes(), type=Departure)
    assert told == replace(left, beat=replace(beat, stored=9, stored_at=7.0))


def test_what_was_stopped(tmp_path: Path) -> None:
    notes = AgentStateFiles(tmp_path)
    assert notes.read_stopped() == 0
    notes.write_stopped(7)
    assert notes.read_stopped() == 7


def test_a_disk_that_takes_nothing_keeps_nobody_from_going_on(tmp_path: Path) -> None:
    full = tmp_path / "full"  # stands for it: nothing can be written below a file
    full.write_bytes(b"")
    notes = AgentStateFiles(full)
    notes.write_deed(RememberDone(Done(id=1, node="n0", ok=True)))
    notes.write_stopped(7)
    notes.write_leave_reason(LEAVE)
    notes.write_deed(RememberLeaving(LEAVE))
    notes.clear_alone()
    notes.reset_notes("/nowhere")
    assert notes.read_leave_intent() is None


def test_the_newest_controller_is_remembered(tmp_path: Path) -> None:
    notes = AgentStateFiles(tmp_path)
    assert notes.read_epoch() == 0
    notes.write_deed(HeedEpoch(3))
    assert notes.read_epoch() == 3
    (tmp_path / "epoch").write_text("torn")
    assert notes.read_epoch() == 0
    AgentStateFiles(tmp_path / "nowhere").write_deed(HeedEpoch(4))  # which costs what it is for, and no more
