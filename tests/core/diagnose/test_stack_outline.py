"""The stacks that an alarm keeps: all ranks in few rows, the named ones marked, and never more than their bound."""

import msgspec
import pytest

from holdfast.core.diagnose.stack_outline import LEFT_OUT, OUTLINE_BYTES, keep_stacks, outline_stacks
from holdfast.core.diagnose.stack_tree import StackBranch, grow_tree, sort_branches
from holdfast.core.rank_ranges import format_ranks
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.rank_traces import StackRow
from tests.core.diagnose.places import RECEIVE, REDUCE, SCRIPT, SLEEP, process, trace

ALARM = Alarm(kind=Kind.HANG, at=1.0, suspects=("n1",), reason="it keeps the others waiting", ranks=(3,))


def innermost(rows: tuple[StackRow, ...]) -> list[StackRow]:
    return [
        row for row, after in zip(rows, (*rows[1:], None), strict=True) if after is None or after.depth <= row.depth
    ]


def test_ranks_at_one_place_share_rows_and_named_ones_are_marked() -> None:
    ranks = [process(rank, SLEEP if rank == 3 else REDUCE) for rank in range(8)]
    rows = outline_stacks(trace(*ranks), named=(3,))
    assert [row.depth for row in rows] == [0, 1, 2, 3, 2]
    assert {row.count for row in rows[:2]} == {8} and not rows[0].named
    wait, sleep = innermost(rows)
    assert (wait.count, wait.ranks, wait.named) == (7, format_ranks([0, 1, 2, 4, 5, 6, 7]), False)
    assert (sleep.ranks, sleep.named) == (format_ranks([3]), True) and sleep.frame.startswith("load (")


def test_a_stopped_rank_and_one_that_is_gone_have_rows_of_their_own() -> None:
    gone = msgspec.structs.replace(process(2, ()), state="X", error="gone: it has ended (exit code 7)")
    rows = outline_stacks(trace(process(0), process(1, state="T"), gone), named=(1, 2))
    (stopped,), (ended,) = ([row for row in rows if row.ranks == f"rank {rank}"] for rank in (1, 2))
    assert [row for row in rows if row.named] == [stopped, ended]
    waits = rows[rows.index(stopped) - 1]
    assert (waits.ranks, waits.here, stopped.here) == ("ranks 0-1", "rank 0", "")
    assert stopped.frame.endswith(f" {waits.frame}"), "where it was stopped"
    assert (waits.count, stopped.depth, ended.depth) == (2, waits.depth + 1, 0) and "exit code 7" in ended.frame


def test_children_count_only_where_they_make_the_steps() -> None:
    loads = process(0, SLEEP, child=True)
    steps = msgspec.structs.replace(process(1, RECEIVE, child=True), steps=True)
    rows = innermost(outline_stacks(trace(process(0), loads, process(1), steps)))
    assert {(row.ranks, row.frame.split()[0]) for row in rows} == {("rank 0", "all_reduce"), ("rank 1", "recv")}


@pytest.mark.parametrize("limit", [2_000, OUTLINE_BYTES])
def test_the_stacks_of_ranks_that_are_all_elsewhere_are_bounded(limit: int) -> None:
    def deep(rank: int) -> tuple[tuple[str, str, int], ...]:
        return (*SCRIPT, *((f"layer_{name(rank)}_{depth}", "/opt/run/model.py", depth) for depth in range(20)))

    def name(rank: int) -> str:  # digits are folded
        return "".join(chr(ord("a") + int(digit)) for digit in str(rank))

    rows = outline_stacks(trace(*(process(rank, deep(rank)) for rank in range(2_000))), (1234,), limit)
    assert len(msgspec.msgpack.encode(rows)) <= limit
    named = [row for row in rows if row.named]
    assert len(named) == 20 and {row.ranks for row in named} == {"rank 1234"}, "it is what people look for"
    below: dict[int, int] = {}
    for row in reversed(rows):  # each row has as many ranks as the rows below it, or more
        assert below.pop(row.depth + 1, row.count) <= row.count
        below[row.depth] = below.get(row.depth, 0) + row.count
    assert below == {0: 2_000}
    left_out = [row for row in rows if row.frame == LEFT_OUT]
    assert left_out and not any(row.ranks for row in left_out)


def test_rows_are_the_tree_that_a_trace_shows() -> None:
    traces = trace(*(process(rank, (REDUCE, RECEIVE, SLEEP)[rank % 3]) for rank in range(9)))
    root = grow_tree(one for told in traces for one in told.processes)
    shown: list[tuple[int, str, int]] = []

    def walk(depth: int, branches: list[StackBranch]) -> None:
        for branch in branches:
            shown.append((depth, branch.frame, len(branch.ranks)))
            walk(depth + 1, sort_branches(branch))

    walk(0, sort_branches(root))
    assert [(row.depth, row.frame, row.count) for row in outline_stacks(traces)] == shown


def test_an_alarm_keeps_them_in_the_journal_and_older_alarms_have_none() -> None:
    alarm = keep_stacks(ALARM, trace(process(2), process(3, SLEEP)), blocking=(2,))
    assert [row.ranks for row in alarm.stacks if row.named] == ["rank 3"], "whom the alarm names, not the look"
    unnamed = keep_stacks(msgspec.structs.replace(ALARM, ranks=()), trace(process(2), process(3, SLEEP)), (2,))
    assert {row.ranks for row in unnamed.stacks if row.named} == {"rank 2"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(alarm), type=Alarm) == alarm
    note = msgspec.structs.replace(ALARM, ranks=(), stance=Stance.OBSERVE)
    assert keep_stacks(note, trace(process(2)), (2,)) == note, "a pause that is only noted"
    older = msgspec.to_builtins(ALARM)
    del older["stacks"]
    assert msgspec.convert(older, Alarm).stacks == ()
