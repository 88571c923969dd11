"""MPS for ranks that share a GPU, by a control program that is played."""

import os
from pathlib import Path

import pytest

from benchmarks._mps import CONTROL, shared_gpu

# It notes its flags and orders, and refuses what the test names.
PLAYED = """#!/bin/sh
order=$([ "$1" = -d ] && echo daemon || cat)
echo "$CUDA_MPS_PIPE_DIRECTORY $order" >> {notes}
case "$order" in {refused}*) echo "no such device" >&2; exit 3;; esac
"""


def play(folder: Path, refused: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    notes, program = folder / "notes", folder / CONTROL
    program.write_text(PLAYED.format(notes=notes, refused=refused or "nothing"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return notes


def told(notes: Path) -> list[str]:
    return [line.partition(" ")[2] for line in notes.read_text().splitlines()]


def test_ranks_get_equal_parts_and_it_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = play(tmp_path, "", monkeypatch)
    with shared_gpu(4) as mps:
        assert (mps.refusal, mps.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("", "25")
        place = Path(mps.env["CUDA_MPS_PIPE_DIRECTORY"])
        assert place.is_dir() and {line.split()[0] for line in notes.read_text().splitlines()} == {str(place)}
        assert told(notes) == ["daemon", f"start_server -uid {os.getuid()}"]
    assert told(notes)[-1] == "quit" and not place.exists()


@pytest.mark.parametrize(("refused", "call"), [("daemon", f"{CONTROL} -d"), ("start_server", CONTROL)])
def test_why_it_does_not_start(refused: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = play(tmp_path, refused, monkeypatch)
    with shared_gpu(4) as mps:
        assert (mps.refusal, mps.env) == (f"{call} ended with 3: no such device", {})
    assert told(notes)[-1] == "quit", "a daemon without a server is not left behind"


def test_a_machine_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with shared_gpu(4) as mps:
        assert mps.refusal == f"{CONTROL} cannot be run: No such file or directory"
