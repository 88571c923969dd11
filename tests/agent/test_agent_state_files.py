"""What outlives agents: errands, behind a torn line too, and since when there is no controller."""

import time
from pathlib import Path

from holdfast.agent.agent_state_files import (
    append_done,
    clear_alone,
    mark_alone,
    read_done,
    read_epoch,
    read_leave_intent,
    read_stopped,
    reset_files,
    write_epoch,
    write_leave_intent,
    write_leave_reason,
    write_stopped,
)
from holdfast.model.errand import Done, Leave

LEAVE = Leave(id=0, code=1, grace_s=2.0, reason="no controller for 60 s")


def test_what_was_carried_out_is_remembered_even_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "done.jsonl"
    assert read_done(path) == ()
    first, second = Done(id=1, node="n0", ok=True), Done(id=2, node="n0", ok=False, detail="no")
    append_done(path, first)
    with path.open("ab") as file:
        file.write(b'\n{"type":"done","id":7,"no')  # the agent died in the middle of it
    append_done(path, second)
    assert read_done(path) == (first, second)


def test_the_next_agent_counts_on_from_when_the_controller_was_lost(tmp_path: Path) -> None:
    before = time.monotonic()
    since = mark_alone(tmp_path)
    assert before <= since <= time.monotonic()
    assert mark_alone(tmp_path) == since  # dials that fail, and agents that are started anew
    clear_alone(tmp_path)
    clear_alone(tmp_path)
    assert mark_alone(tmp_path) > since


def test_what_cannot_be_read_counts_from_now(tmp_path: Path) -> None:
    (tmp_path / "alone").write_text("torn")
    before = time.monotonic()
    assert mark_alone(tmp_path) >= before
    (tmp_path / "alone").write_text(f"{before + 1e6}\n")  # of a machine that has been started anew since
    assert mark_alone(tmp_path) <= time.monotonic()
    assert mark_alone(tmp_path / "nowhere") >= before


def test_who_was_about_to_leave_is_known_to_the_next_agent_not_to_the_next_holder(tmp_path: Path) -> None:
    assert read_leave_intent(tmp_path) is None
    write_leave_intent(tmp_path, LEAVE)
    clear_alone(tmp_path)  # a controller that is back changes nothing: ranks may have been ended
    assert read_leave_intent(tmp_path) == LEAVE
    reset_files(tmp_path)
    assert read_leave_intent(tmp_path) is None
    (tmp_path / "leaving.json").write_bytes(b"{")
    assert read_leave_intent(tmp_path) is None


def test_what_was_stopped(tmp_path: Path) -> None:
    assert read_stopped(tmp_path) == 0
    write_stopped(tmp_path, 7)
    assert read_stopped(tmp_path) == 7


def test_a_disk_that_takes_nothing_keeps_nobody_from_going_on(tmp_path: Path) -> None:
    full = tmp_path / "full"  # stands for it: nothing can be written below a file
    full.write_bytes(b"")
    append_done(full / "done.jsonl", Done(id=1, node="n0", ok=True))
    write_stopped(full, 7)
    write_leave_reason(full, LEAVE)
    write_leave_intent(full, LEAVE)
    clear_alone(full)
    reset_files(full)
    assert read_leave_intent(full) is None


def test_the_newest_controller_is_remembered(tmp_path: Path) -> None:
    assert read_epoch(tmp_path) == 0
    write_epoch(tmp_path, 3)
    assert read_epoch(tmp_path) == 3
    (tmp_path / "epoch").write_text("torn")
    assert read_epoch(tmp_path) == 0
    write_epoch(tmp_path / "nowhere", 4)  # which costs what it is for, and no more
