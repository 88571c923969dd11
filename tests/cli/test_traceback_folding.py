"""Tracebacks of many ranks on one console: the first cause whole, the rest in a line each, nothing lost."""

from pathlib import Path

import pytest

from holdfast.cli.terminal import traceback_folding
from holdfast.cli.terminal.traceback_folding import TracebackFolding
from holdfast.logs import catalog_files
from holdfast.logs.log_diagnosis import is_echo


def traceback(last: str, frames: int = 3) -> list[bytes]:
    lines = ["Traceback (most recent call last):"]
    lines += [f'  File "train.py", line {n}, in step\n    x = y' for n in range(frames)]
    return "\n".join([*lines, last]).encode().split(b"\n")


class Ranks:
    def __init__(self, folder: Path, count: int) -> None:
        self.paths = [folder / "gen-1" / f"rank-{rank}" / "stderr.log" for rank in range(count)]
        for path in self.paths:
            path.parent.mkdir(parents=True)
        self.folding = TracebackFolding(lambda last: b"closed by peer" in last)

    def said(self, rank: int, lines: list[bytes]) -> list[bytes]:
        """All that is shown of them when nothing follows."""
        return self.folding.fold_lines(self.paths[rank], lines) + self.folding.end_traceback(self.paths[rank])


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path, 3)


def test_the_first_cause_is_shown_whole(ranks: Ranks) -> None:
    cause = traceback("ValueError: lr")
    assert ranks.said(1, [b"before", *cause]) == [b"before", *cause]


def test_an_echo_is_one_line_that_names_its_log(ranks: Ranks) -> None:
    echo = traceback("RuntimeError: Connection closed by peer")
    where = f"(of a rank that lost another; {len(echo)} lines in {ranks.paths[0]})"
    assert ranks.said(0, [*echo, b"after"]) == [
        f"RuntimeError: Connection closed by peer {where}".encode(),
        b"after",
    ]


def test_the_same_exception_of_another_rank(ranks: Ranks) -> None:
    cause = traceback("ValueError: lr")
    assert ranks.said(0, cause) == cause
    assert ranks.said(2, cause) == [f"ValueError: lr (as rank 0; {len(cause)} lines in {ranks.paths[2]})".encode()]
    assert ranks.said(0, cause) == cause, "the rank itself, once more"
    assert ranks.said(2, traceback("ValueError: other")) == traceback("ValueError: other")


def test_exceptions_that_lead_to_one_another_are_one(ranks: Ranks) -> None:
    chain = [
        *traceback("KeyError: 'a'"),
        b"",
        b"During handling of the above exception, another exception occurred:",
        b"",
        *traceback("RuntimeError: Connection closed by peer"),
    ]
    (line,) = ranks.said(0, chain)
    assert line.startswith(b"RuntimeError: Connection closed by peer (") and b"%d lines" % len(chain) in line


def test_two_that_follow_each_other_are_two(ranks: Ranks) -> None:
    first, second = traceback("ValueError: a"), traceback("ValueError: b")
    assert ranks.said(0, [*first, *second]) == [*first, *second]


def test_torchs_own_prefix_is_not_shown_twice(ranks: Ranks) -> None:
    cause = traceback("ValueError: lr")
    assert ranks.said(1, [b"[rank1]: " + line for line in cause]) == cause
    assert ranks.said(1, [b"[rank2]: hello"]) == [b"[rank2]: hello"]


def test_frames_of_native_code_are_one_line(ranks: Ranks) -> None:
    frames = [b"[rank1]: frame #%d: c10::Error + 0x1f (0x7f in libc10.so)" % number for number in range(20)]
    said = ranks.said(1, [b"Exception raised from checkForNCCLErrors", *frames, b"after"])
    where = f"(frames of C++: 20 lines in {ranks.paths[1]})".encode()
    assert said == [b"Exception raised from checkForNCCLErrors", where, b"after"]


def test_one_that_is_cut_off_is_shown(ranks: Ranks) -> None:
    cut = traceback("ValueError: lr")[:-1]
    assert ranks.said(0, cut) == cut


def test_an_endless_one_is_shown(ranks: Ranks) -> None:
    flood = [traceback("x")[0], *[b"  File"] * 5_000]
    shown = ranks.said(0, flood)
    assert shown == flood


def test_a_rank_alone_has_no_echo(tmp_path: Path) -> None:
    echo = traceback("RuntimeError: Connection closed by peer")
    assert Ranks(tmp_path, 1).said(0, echo) == echo


def test_what_is_held_is_shown_soon(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.folding.fold_lines(ranks.paths[0], traceback("ValueError: a"))
    assert ranks.folding.ended_paths() == []
    monkeypatch.setattr(traceback_folding, "_HELD_S", -1.0)
    assert ranks.folding.ended_paths() == [ranks.paths[0]]


@pytest.mark.parametrize(
    ("last", "echo"),
    [
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234", True),
        ("torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error", True),
        ("ValueError: bad learning rate", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", False),
        ("KeyError: 'Connection'", False),
    ],
)
def test_which_exceptions_are_echoes(last: str, echo: bool) -> None:
    assert is_echo(last, catalog_files.load_built_in()) is echo
