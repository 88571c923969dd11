"""The front's ear for signals, and its last words about a node."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from holdfast.cli.launch import controller_console, stoppable_wait, supervisor
from holdfast.cli.launch.supervisor import StopSignals, Supervisor, _describe_room_wait, _farewell_text
from holdfast.cli.run_dirs import run_directory
from holdfast.config import Settings
from holdfast.journal.high_water_mark import HighWaterMark, MarkFile
from holdfast.journal.journal_errors import JournalAwayError, JournalFullError
from holdfast.linux.local_time import clock_text
from holdfast.model.job_phase import Phase
from holdfast.wire.program_fork_server import ForkServer


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, action in before.items():
        signal.signal(number, action)


def test_signals_are_counted() -> None:
    asked = StopSignals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked.numbers == [signal.SIGTERM]
    assert asked.code == 143
    assert not asked.more_than(1)()
    os.kill(os.getpid(), signal.SIGINT)
    assert asked.more_than(1)()
    assert asked.code == 143, "the first one counts"


def test_a_terminal_that_goes_away_is_no_wish_to_end() -> None:
    for before in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGHUP, before)
        asked = StopSignals()
        os.kill(os.getpid(), signal.SIGHUP)
        assert asked.numbers == []


def test_training_goes_on_only_if_it_has_begun(tmp_path: Path) -> None:
    front = Supervisor.__new__(Supervisor)
    front._run_dir, front._lease = tmp_path, None
    before = front._meanwhile_text()
    mark = HighWaterMark(start=b"", epoch=1, phase=Phase.STARTING)
    marking = MarkFile(tmp_path / "journal.mark", mark)
    assert front._meanwhile_text() == before
    marking.write_mark(msgspec.structs.replace(mark, phase=Phase.TRAINING))
    assert front._meanwhile_text() != before
    marking.write_mark(msgspec.structs.replace(mark, phase=Phase.STOPPING))
    assert front._meanwhile_text() == before, "ranks are being ended"
    marking.close()


@pytest.mark.e2e
def test_a_fork_server_that_was_killed_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    front = Supervisor.__new__(Supervisor)
    front._run_dir, front._lease = tmp_path, None
    with (tmp_path / "fork.log").open("wb") as log:
        front._server = ForkServer(tmp_path / "fork.sock", (), dict(os.environ), log.fileno())
    front._look_at_fork_server()
    assert capfd.readouterr().err == ""
    os.kill(front._server._process.pid, signal.SIGKILL)
    front._server._process.wait()
    front._look_at_fork_server()
    front._look_at_fork_server()
    said = capfd.readouterr().err
    assert said.count("SIGKILL") == 1


def test_why_a_node_left(tmp_path: Path) -> None:
    said = _farewell_text(tmp_path, -9)
    assert "code -9" in said and f"{tmp_path}/holder.log" in said
    (tmp_path / "left").write_text("all ranks ended well\n")
    assert _farewell_text(tmp_path, 0) == "done: all ranks ended well"
    (tmp_path / "left").write_text("evicted\n")
    assert _farewell_text(tmp_path, 1).endswith("code 1: evicted")


def test_a_full_disk_is_waited_for_longer_than_nodes_keep_their_memory() -> None:
    now = 1.8e9
    assert _describe_room_wait(now, 600, 60) == (
        f"free space by {clock_text(now + 60)}, or nodes end their ranks, and what is in memory alone is lost; "
        f"it still restarts if you do so by {clock_text(now + 600)}"
    )
    assert _describe_room_wait(now, 600, 1800) == f"it restarts if you free space by {clock_text(now + 600)}"


def test_a_full_disk_is_told_once_however_often_the_controller_starts_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    front = Supervisor.__new__(Supervisor)
    front._run_dir, front._lease, front._server, front._asked = tmp_path, None, None, StopSignals()
    spec = SimpleNamespace(settings=Settings(), fleet="local")
    monkeypatch.setattr(run_directory, "read_spec", lambda _: spec)
    # Full after the controller's end, then with room at the next look; it lived long before the third time only.
    full = iter([True, True, False] * 3)
    monkeypatch.setattr(run_directory, "is_disk_full", lambda _: next(full))
    lives = iter([100.0, 0.0, 100.0])

    def watch(process: object) -> int | None:
        lived_s = next(lives, None)
        monkeypatch.setattr(supervisor, "_LIVED_S", -1.0 if lived_s else 1000.0)
        return 0 if lived_s is None else None

    monkeypatch.setattr(front, "_start_controller", lambda server: None)
    monkeypatch.setattr(front, "_watch_controller", watch)
    monkeypatch.setattr(front, "_waits_for_nodes", lambda: False)
    monkeypatch.setattr(supervisor, "clock_text", lambda at: "12:00:00")
    assert front._keep_controller() == 0
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2 and said[0] == said[1], "the second time it was full anew"
    assert said[0] == (
        f"holdfast: the disk that holds {tmp_path} is full, so the controller ended; {_describe_room_wait(0, 600, 60)}"
    )


def test_what_an_earlier_controller_noted_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process number may come again, as in a container: its note would end a run that goes on."""
    front = object.__new__(Supervisor)
    front._run_dir, front._lease, front._server = tmp_path, None, None
    stoppable_wait.note_stop(tmp_path, 143)
    seen: list[object] = []
    monkeypatch.setattr(
        front, "_start_controller", lambda server: seen.append(stoppable_wait.read_note(tmp_path, os.getpid()))
    )
    monkeypatch.setattr(front, "_watch_controller", lambda process: 0)
    monkeypatch.setattr(front, "_waits_for_nodes", lambda: False)
    assert front._keep_controller() == 0 and seen == [None]


def test_the_front_alone_says_that_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = ExceptionGroup("", [JournalFullError("no room"), ExceptionGroup("", [JournalFullError("no room")])])
    away = ExceptionGroup("", [JournalAwayError("away")])
    for is_full, told in ((True, ["away"]), (False, ["no room", "away"])):  # not full: a quota, which nobody else sees
        said: list[str] = []
        monkeypatch.setattr(run_directory, "is_disk_full", lambda _, is_full=is_full: is_full)
        for group in (full, away):
            controller_console.tell_interruption(tmp_path, group, said.append)
        assert said == told
