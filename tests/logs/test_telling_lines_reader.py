"""Logs from files, in pieces."""

import io
from pathlib import Path

import pytest

from holdfast.logs import telling_lines_reader
from holdfast.logs.log_diagnosis import ProcessEnds, RankLog, diagnose_logs, open_log, read_whole
from tests.core.words.knowing import CATALOG
from tests.core.words.test_failure_classifier import BOOM, ECHO


@pytest.mark.parametrize("chunk", [1 << 10, 7777, 1 << 20])
def test_pieces_do_not_cut_lines(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling_lines_reader, "_CHUNK", chunk)
    noise = "".join(f"iteration {n} loss 2.3 with some more words to fill the line\n" for n in range(4000))
    seen: list[int] = []
    text = f"{noise}{BOOM}{noise}".encode()
    kept = telling_lines_reader.read_telling_lines(io.BytesIO(text), CATALOG, seen.append)
    lines = text.decode().split("\n")
    assert all(lines[index] == line for index, line in kept)
    assert BOOM.split("\n")[-2] in [line for _, line in kept]
    assert seen == sorted(seen) and seen[-1] == len(text)


def test_a_line_without_an_end() -> None:
    kept = telling_lines_reader.read_telling_lines(io.BytesIO(b"x" * (8 << 20)), CATALOG)
    assert kept and all(len(line) < 5000 for _, line in kept)


@pytest.mark.parametrize(
    ("name", "rank", "kernel"),
    [
        ("rank3.txt", 3, False),
        ("rank_3.log", 3, False),
        ("node1_rank3.log", 3, False),
        ("gen-2/rank-3/stderr.log", 3, False),
        ("attempt_0/3/stderr.log", 3, False),
        ("kernel.txt", None, True),
        ("dmesg-n1.log", None, True),
        ("slurm-4711.out", None, False),
        ("franker3.txt", None, False),
        ("lost_rank6/log.txt", None, False),
    ],
)
def test_whose_log_by_its_name(name: str, rank: int | None, kernel: bool) -> None:
    log = open_log(Path("/logs") / name)
    assert (log.rank, log.kernel) == (rank, kernel)


def log(text: str, rank: int | None = None) -> RankLog:
    return RankLog(open=lambda: io.BytesIO(text.encode()), rank=rank)


def test_when_ranks_ended_decides_where_nothing_else_does() -> None:
    logs = [log("TypeError: late", 0), log("KeyError: early", 1)]
    assert diagnose_logs(logs, ProcessEnds(at={0: 9.0, 1: 5.0}), CATALOG).root_rank == 1
    assert diagnose_logs(logs, ProcessEnds(at={0: 5.0, 1: 9.0}), CATALOG).root_rank == 0
    assert diagnose_logs([log(ECHO, 0), log("", 1)], ProcessEnds(codes={0: 1, 1: -11}), CATALOG).root_rank == 1


def test_all_of_it_once_more() -> None:
    assert b"".join(read_whole([log("a\n"), log("b")])) == b"a\n\nb\n"
