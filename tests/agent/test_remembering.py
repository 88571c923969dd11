"""What outlives agents: errands, behind a torn line too, and since when there is no controller."""

import time
from pathlib import Path

from holdfast.agent.remembering import (
    begin,
    heed,
    heeded,
    intend,
    intended,
    leave,
    met,
    parted,
    recall,
    remember,
    stop,
    stopped,
)
from holdfast.model.errand import Done, Leave

LEAVE = Leave(id=0, code=1, grace_s=2.0, reason="no controller for 60 s")


def test_what_was_carried_out_is_remembered_even_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "done.jsonl"
    assert recall(path) == ()
    first, second = Done(id=1, node="n0", ok=True), Done(id=2, node="n0", ok=False, detail="no")
    remember(path, first)
    with path.open("ab") as file:
        file.write(b'\n{"type":"done","id":7,"no')  # the agent died in the middle of it
    remember(path, second)
    assert recall(path) == (first, second)


def test_the_next_agent_counts_on_from_when_the_controller_was_lost(tmp_path: Path) -> None:
    before = time.monotonic()
    since = parted(tmp_path)
    assert before <= since <= time.monotonic()
    assert parted(tmp_path) == since  # dials that fail, and agents that are started anew
    met(tmp_path)
    met(tmp_path)
    assert parted(tmp_path) > since


def test_what_cannot_be_read_counts_from_now(tmp_path: Path) -> None:
    (tmp_path / "alone").write_text("torn")
    before = time.monotonic()
    assert parted(tmp_path) >= before
    (tmp_path / "alone").write_text(f"{before + 1e6}\n")  # of a machine that has been started anew since
    assert parted(tmp_path) <= time.monotonic()
    assert parted(tmp_path / "nowhere") >= before


def test_who_was_about_to_leave_is_known_to_the_next_agent_not_to_the_next_holder(tmp_path: Path) -> None:
    assert intended(tmp_path) is None
    intend(tmp_path, LEAVE)
    met(tmp_path)  # a controller that is back changes nothing: ranks may have been ended
    assert intended(tmp_path) == LEAVE
    begin(tmp_path)
    assert intended(tmp_path) is None
    (tmp_path / "leaving.json").write_bytes(b"{")
    assert intended(tmp_path) is None


def test_what_was_stopped(tmp_path: Path) -> None:
    assert stopped(tmp_path) == 0
    stop(tmp_path, 7)
    assert stopped(tmp_path) == 7


def test_a_disk_that_takes_nothing_keeps_nobody_from_going_on(tmp_path: Path) -> None:
    full = tmp_path / "full"  # stands for it: nothing can be written below a file
    full.write_bytes(b"")
    remember(full / "done.jsonl", Done(id=1, node="n0", ok=True))
    stop(full, 7)
    leave(full, LEAVE)
    intend(full, LEAVE)
    met(full)
    begin(full)
    assert intended(full) is None


def test_the_newest_controller_is_remembered(tmp_path: Path) -> None:
    assert heeded(tmp_path) == 0
    heed(tmp_path, 3)
    assert heeded(tmp_path) == 3
    (tmp_path / "epoch").write_text("torn")
    assert heeded(tmp_path) == 0
    heed(tmp_path / "nowhere", 4)  # which costs what it is for, and no more
