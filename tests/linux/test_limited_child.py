"""A function in a child process with little memory."""

import os
import signal

import pytest

from holdfast.linux.limited_child import ChildEndedError, call_in_child

MIB = 1 << 20


def test_an_answer_of_any_size() -> None:
    parent = os.getpid()
    assert call_in_child(lambda: f"{os.getppid()}".encode() + bytes(MIB), 64 * MIB) == f"{parent}".encode() + bytes(MIB)


def test_too_much_memory_is_told() -> None:
    with pytest.raises(ChildEndedError) as ended:
        call_in_child(lambda: bytes(200 * MIB), 64 * MIB)
    assert str(ended.value) == "needed more than 64 MiB of memory"
    assert len(bytes(200 * MIB)) == 200 * MIB, "the limit is the child's"


def test_a_crash_is_told() -> None:
    def crash() -> bytes:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
        return b""

    with pytest.raises(ChildEndedError) as ended:
        call_in_child(crash, MIB)
    assert str(ended.value) == "ended with SIGSEGV"


def test_a_bug_is_shown_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildEndedError) as ended:
        call_in_child(lambda: b"%d" % (1 // 0), 64 * MIB)
    assert str(ended.value) == "ended with code 1"
    assert "ZeroDivisionError" in capfd.readouterr().err
