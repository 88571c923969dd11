"""The last line of a child process: whole where it is short, and without secrets wherever it is cut."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.probes import probe_team
from holdfast.agent.probes.probe_team import TeamError, TeamSeat, TeamTask
from holdfast.agent.system.child_last_line import read_last_line

SECRET = "correct-horse-battery"
LONG = "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY"


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", SECRET)


def test_the_last_line_that_is_not_blank(file: int) -> None:
    assert read_last_line(file) == ""
    os.write(file, b"first\n  the cause: \xff \n\n \n")
    assert read_last_line(file) == "the cause: \ufffd"


@pytest.mark.parametrize("before", range(270, 306, 5))
def test_no_head_of_a_secret_stays_where_a_line_is_cut(file: int, before: int) -> None:
    os.write(file, f"{'x' * before} {SECRET} password=correct-{SECRET}-horse\n".encode())
    said = read_last_line(file)
    assert said.startswith("xxx") and len(said) <= 300 and "corr" not in said


def test_no_tail_of_a_secret_stays_where_a_file_is_cut(file: int) -> None:
    """One line of more than is read; what is read of it begins in the middle of a token."""
    body = b"hf_" + LONG.encode() + b" " + b"yyyy " * (((1 << 16) - 12) // 5)
    os.write(file, body)
    said = read_last_line(file)
    assert said.startswith("yyy") and LONG[-8:] not in said


def test_a_key_is_masked_whose_first_line_is_before_what_is_read(file: int) -> None:
    os.write(file, b"-----BEGIN PRIVATE KEY-----\n" + b"\n" * (1 << 16) + f"{LONG * 2}\n{LONG[:12]}==\n".encode())
    os.write(file, b"-----END PRIVATE KEY-----\n")
    assert read_last_line(file) == "<private key>"


def test_a_team_quotes_its_process_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{'x' * 285} '\"$A_TOKEN\" >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr("holdfast.agent.probes.probe_team.sys.executable", str(python))
    task = TeamTask(module="any", rank=0, world=1, port=0, device="cpu", limit_s=60.0)
    with pytest.raises(TeamError) as told:
        probe_team.run_team([TeamSeat(place="seat0", device="cpu")], task, TeamTask)
    assert str(told.value).startswith("seat0: xxx") and "corr" not in str(told.value)
