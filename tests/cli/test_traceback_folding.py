"""Tracebacks of many ranks on one console: the first cause whole, the rest in a line each, nothing lost."""

from pathlib import Path

import pytest

from holdfast.cli.terminal import traceback_folding
from holdfast.cli.terminal.traceback_folding import TracebackFolding
from holdfast.logs import catalog_files
from holdfast.logs.log_diagnosis import is_echo, is_lost_peer


def traceback(last: str, frames: int = 3) -> list[bytes]:
    lines = ["Traceback (most recent call last):"]
    lines += [f'  File "train.py", line {n}, in step\n    x = y' for n in range(frames)]
    return "\n".join([*lines, last]).encode().split(b"\n")


class Ranks:
    def __init__(self, folder: Path, count: int) -> None:
        self.paths = [folder / "gen-1" / f"rank-{rank}" / "stderr.log" for rank in range(count)]
        for path in self.paths:
            path.parent.mkdir(parents=True)
        catalog = catalog_files.load_built_in()
        self.folding = TracebackFolding(
            lambda last: b"closed by peer" in last,
            lambda report: is_lost_peer([line.decode() for line in report], catalog),
        )

    def said(self, rank: int, lines: list[bytes]) -> list[bytes]:
        """All that is shown of them when nothing follows."""
        now = self.folding.fold_lines(self.paths[rank], lines) + self.folding.end_traceback(self.paths[rank])
        return now + [line for _, line in self.folding.take_same(over=1)]

    def all_say(self, *reports: list[bytes]) -> list[bytes]:
        """What is shown of all ranks together."""
        shown: list[bytes] = []
        for path, lines in zip(self.paths, reports, strict=True):
            shown += self.folding.fold_lines(path, lines)
            shown += self.folding.end_traceback(path)
        return shown + [line for _, line in self.folding.take_same(over=1)]


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
        b"after",
        f"RuntimeError: Connection closed by peer {where}".encode(),
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


# --- reports of torch's C++ ------------------------------------------------------------------------------------------

GONE = (
    "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "Last error:",
    "socketProgress: Connection closed by remote peer host2<43210>",
)
ILLEGAL = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA kernel errors might be asynchronously reported at some other API call.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "",
)
TIMEOUT = ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=992, OpType=ALLREDUCE) ran for 600010 ms",)


def watchdog(rank: int, message: tuple[str, ...], frames: int = 30) -> list[bytes]:
    """What a rank of NCCL writes when its watchdog ends it: the same twice, with two stacks."""
    group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    told = f"{group} Process group watchdog thread terminated with exception: {message[0]}"
    stack = ["Exception raised from check at /pytorch/ProcessGroupNCCL.cpp:2568 (most recent call first):"]
    stack += [
        f"frame #{n}: c10d::check(std::string const&) + 0x{rank}f (0x7f{rank}a in libc10.so)" for n in range(frames)
    ]
    text = [f"[rank{rank}]:[E1117 06:14:2{rank}.43993 ProcessGroupNCCL.cpp:2057] {told}", *message[1:], *stack, ""]
    text += ["terminate called after throwing an instance of 'c10::DistBackendError'", f"  what():  {told}"]
    text += [*message[1:], *stack, "", *stack, ""]
    return "\n".join(text).encode().split(b"\n")


def test_ranks_that_lost_their_peer_are_one_line(ranks: Ranks) -> None:
    cause = traceback("ValueError: lr")
    reports = [watchdog(rank, GONE) for rank in (0, 1)]
    *shown, line = ranks.all_say(*reports, [*cause, b""])
    assert shown == [*cause, b""]
    assert line == b"ranks 0-1 lost their peer (%d lines in %s)" % (
        sum(map(len, reports)),
        bytes(ranks.paths[0].parents[1]),
    )


def test_a_thousand_ranks_fit_on_a_screen(tmp_path: Path) -> None:
    many = Ranks(tmp_path, 1000)
    cause = traceback("ValueError: lr")
    reports = [
        watchdog(rank, GONE) if rank % 2 else traceback("RuntimeError: Connection closed by peer")
        for rank in range(1000)
    ]
    reports[7] = cause
    shown = many.all_say(*reports)
    assert len(shown) < 24 and shown[: len(cause)] == cause
    assert shown[-1].startswith(b"ranks 0-6, 8-999 lost their peer (")


def test_one_rank_that_lost_its_peer_says_what_it_saw(ranks: Ranks) -> None:
    report = watchdog(1, GONE)
    (line,) = ranks.said(1, report)
    assert b"remote process exited" in line
    assert line.endswith(b"(of a rank that lost another; %d lines in %s)" % (len(report), bytes(ranks.paths[1])))


@pytest.mark.parametrize("message", [ILLEGAL, TIMEOUT])
def test_a_report_of_something_else_is_shown_once(ranks: Ranks, message: tuple[str, ...]) -> None:
    shown = ranks.all_say(*(watchdog(rank, message) for rank in range(3)))
    whole = [line for line in watchdog(0, message) if not line.startswith(b"frame #")]
    assert [line for line in shown[:-1] if not line.startswith(b"(frames of C++: 30 lines in ")] == whole
    assert shown[-1].startswith(b"ranks 1-2 say the same as rank 0: [rank1]:[E1117")


def test_a_rank_alone_shows_all_of_its_report(tmp_path: Path) -> None:
    report = watchdog(0, GONE)
    assert Ranks(tmp_path, 1).said(0, [*report, report[0], b"step 41"]) == [*report, report[0], b"step 41"]


def test_lines_of_the_script_are_never_folded(ranks: Ranks) -> None:
    head, report = watchdog(1, GONE)[0], watchdog(1, GONE)
    for told in (report, report[:-1]):
        shown = ranks.said(1, [*told, b"step 41", b"", *report])
        assert shown[:2] == [b"step 41", b""] and len(shown) == 3, "after a stack"
        assert b"step 41" in ranks.said(1, [*told, b"step 41", *report[4:]]), "and before another one"
    for first in (head, watchdog(1, ILLEGAL)[0]):
        shown = ranks.said(1, [first, b"step 41", b"", first, b"step 42"])
        assert [line for line in shown if line[:4] in (b"step", b"")] == [b"step 41", b"", b"step 42"], "between heads"
    steps = [b"step %d" % n for n in range(100)]
    assert ranks.said(1, [head, *steps])[:-1] == steps, "after a head without a stack"
    assert ranks.folding.fold_lines(ranks.paths[1], [head, *steps]) == steps, "and without waiting for more"
    cause = traceback("ValueError: lr")
    assert ranks.said(1, [head, *cause])[: len(cause)] == cause, "an exception after it"


def test_all_that_nccl_says_in_an_exception_is_folded(ranks: Ranks) -> None:
    said = [line.encode() for line in GONE[1:]]
    echo = [*traceback("torch.distributed.DistBackendError: closed by peer"), *said]
    (line, *more) = ranks.said(0, [*echo, b"after"])[::-1]
    assert more == [b"after"] and b"%d lines" % len(echo) in line


def test_others_that_say_the_same_are_waited_for(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.folding.fold_lines(ranks.paths[0], watchdog(0, GONE))
    ranks.folding.end_traceback(ranks.paths[0])
    assert ranks.folding.take_same() == []
    monkeypatch.setattr(traceback_folding, "_GATHER_S", -1.0)
    assert [path for path, _ in ranks.folding.take_same()] == [ranks.paths[0]]
    assert ranks.folding.take_same(over=1) == []
