"""The front's ear for signals, and its last words about a node."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.launch.supervisor import StopSignals, Supervisor, _describe_room_wait, _farewell_text
from holdfast.journal.high_water_mark import HighWaterMark, MarkFile
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
    assert _describe_room_wait(600, 60) == (
        "it restarts if you free space within 600 s; "
        "after 60 s nodes end their ranks, and what is in memory alone is lost"
    )
    assert _describe_room_wait(600, 1800) == "it restarts if you free space within 600 s"
