"""Whatever was done is undone: when asked, and when whoever did it is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from holdfast.chaos.injection_records import ContinueProcess, DutyCycle, ForgetEntry, PatchByte, RemoveFile, RewriteFile
from holdfast.chaos.process_handles import start_ticks
from holdfast.chaos.undo_guard import KeepUndo, UndoGuard
from tests.chaos.target import BUSY, stands, target
from tests.cli.driver import until

pytestmark = pytest.mark.e2e


def test_a_stopped_process_goes_on_when_asked() -> None:
    with UndoGuard() as guard, target() as process:
        guard.keep_undo(1, ContinueProcess(process.pid, start_ticks(process.pid)))
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: stands(process.pid), "it stands")
        assert guard.has_undo(1) and guard.run_undo(1) == "" and not guard.has_undo(1)
        until(lambda: not stands(process.pid), "it goes on")


def test_it_goes_on_when_the_injector_is_killed() -> None:
    with target() as process:
        code = textwrap.dedent(f"""
            import os, signal, time
            from holdfast.chaos.injection_records import ContinueProcess
            from holdfast.chaos.undo_guard import UndoGuard, KeepUndo
            guard = UndoGuard()
            guard.keep_undo(1, ContinueProcess({process.pid}, {start_ticks(process.pid)}))
            os.kill({process.pid}, signal.SIGSTOP)
            print("done", flush=True)
            time.sleep(600)
        """)
        injector = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert injector.stdout and injector.stdout.readline() == b"done\n"
        until(lambda: stands(process.pid), "it stands")
        injector.kill()
        injector.wait()
        injector.stdout.close()
        until(lambda: not stands(process.pid), "it goes on")


def test_it_goes_on_when_the_injector_is_killed_before_it_hears_the_answer() -> None:
    with target() as process:
        argv = [sys.executable, "-m", "holdfast.chaos.undo_guard"]
        guard = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert guard.stdin and guard.stdout
        guard.stdin.write(
            msgspec.json.encode(KeepUndo(1, (ContinueProcess(process.pid, start_ticks(process.pid)),))) + b"\n"
        )
        guard.stdin.flush()
        assert guard.stdout.readline() == b"[]\n"
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: stands(process.pid), "it stands")
        guard.stdout.close()
        guard.stdin.write(msgspec.json.encode(KeepUndo(2, ())) + b"\n")
        guard.stdin.close()
        assert guard.wait(20) == 0
        assert not stands(process.pid)


def test_nothing_is_left_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("new")
    (tmp_path / "more").touch()
    with UndoGuard() as guard:
        guard.keep_undo(1, RewriteFile(str(file), "old"), RemoveFile(str(tmp_path / "more")))
        guard.keep_undo(2, RewriteFile(str(tmp_path / "gone"), "old"), ForgetEntry(str(tmp_path / "gone"), "1"))
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"], "what is gone by itself does not come back"


def test_a_byte_is_mended_unless_somebody_has_changed_it(tmp_path: Path) -> None:
    for name, content, then in (("mine", b"abXd", b"abcd"), ("other", b"abYd", b"abYd")):
        path = tmp_path / name
        path.write_bytes(content)
        with UndoGuard() as guard:
            guard.keep_undo(1, PatchByte(str(path), path.stat().st_ino, 2, ord("X"), ord("c")))
            assert guard.run_undo(1) == ""
        assert path.read_bytes() == then


def test_a_duty_is_a_part_of_the_time() -> None:
    with target(BUSY) as process:
        with UndoGuard() as guard:
            guard.keep_undo(1, DutyCycle(process.pid, start_ticks(process.pid), 0.3))
            until(lambda: stands(process.pid), "it is stopped")
            until(lambda: not stands(process.pid), "it runs")
            until(lambda: stands(process.pid), "it is stopped again")
        assert not stands(process.pid)


def test_a_duty_that_was_undone_stops_nobody() -> None:
    """Undone at any instant of its period."""
    with target() as process, UndoGuard() as guard:
        for number in range(1, 37):  # each instant three times
            guard.keep_undo(number, DutyCycle(process.pid, start_ticks(process.pid), 0.5))
            time.sleep(0.05 + number % 12 / 120)
            assert guard.run_undo(number) == ""
            time.sleep(0.02)  # a turn later
            assert not stands(process.pid), f"after {number}"
