"""Writes that fail, hang or are wrong become outcomes; nothing is raised, and nobody waits for ever."""

import threading
import time

import pytest

from holdfast.checkpoint.storage_errors import StorageError, WriteGivenUpError
from holdfast.checkpoint.write_lane import WriteLane, WritePulse


def test_a_write_that_comes_to_its_end() -> None:
    def write(pulse: WritePulse) -> str:
        pulse.add_bytes(7)
        return "there/step-00000003"

    outcome = WriteLane("there", print).run(3, write)
    assert (outcome.ok, outcome.step, outcome.url, outcome.bytes) == (True, 3, "there/step-00000003", 7)
    assert "there/step-00000003" in outcome.detail


def test_trouble_is_told_in_a_sentence() -> None:
    def write(pulse: WritePulse) -> str:
        raise StorageError("there/file: full")

    outcome = WriteLane("there", print).run(3, write)
    assert not outcome.ok
    assert outcome.detail.startswith("step 3 ") and outcome.detail.endswith(": there/file: full")


def test_a_bug_is_an_outcome_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    outcome = WriteLane("there", print).run(3, lambda _: str(1 / 0))
    assert not outcome.ok and outcome.detail.startswith("step 3 ")
    assert len(shown) == 1


def test_storage_that_hangs_is_left_behind_and_taken_up_again_when_it_answers() -> None:
    answers = threading.Event()
    ended: list[StorageError] = []

    def hang(pulse: WritePulse) -> str:
        answers.wait(60)
        try:
            pulse.add_bytes(1)
        except StorageError as e:
            ended.append(e)
            raise
        return "there/step-00000001"

    lane = WriteLane("there", print, stall_s=0.1, kind="the disk")
    first = lane.run(1, hang)
    assert first.detail == "the disk at there has taken nothing for 0.1 s, so step 1 was given up"
    second = lane.run(2, lambda _: "there")
    assert second.detail == "the disk at there still holds up the write of step 1, so step 2 is left out"
    assert not (first.ok or second.ok)
    answers.set()
    [thread] = [one for one in threading.enumerate() if one.name == "holdfast-write-1"]
    thread.join(30)
    assert [type(e) for e in ended] == [WriteGivenUpError]  # so that nothing of it is ever published
    assert lane.run(3, lambda _: "there").ok


def test_slow_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(pulse: WritePulse) -> str:
        for _ in range(10):
            now[0] += 50.0
            pulse.add_bytes(1)
        return "there"

    outcome = WriteLane("there", print, stall_s=60.0).run(1, slow)
    assert (outcome.ok, outcome.took_s) == (True, 500.0)


def test_a_note_is_told_once() -> None:
    said: list[str] = []
    lane = WriteLane("there", said.append)

    def write(pulse: WritePulse) -> str:
        pulse.notes += ["no direct I/O", "no direct I/O"]
        return "there"

    lane.run(1, write)
    lane.run(2, write)
    assert said == ["no direct I/O"]
