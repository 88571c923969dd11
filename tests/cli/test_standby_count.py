"""`--standbys auto`: the number follows from the journals of past runs, and the reason is said."""

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.cli.launch import standby_count
from holdfast.cli.launch.standby_count import add_run, choose_standbys
from holdfast.cli.run_flags.run_arguments import RunArgs, parse_run_args
from holdfast.core.membership.loss_rate import NodeLosses
from holdfast.core.record.job_account import TimeUse
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Tick
from holdfast.model.journal_entry import Decision, Entry
from tests.cli.conftest import Start
from tests.cli.console_transcript import assert_screens
from tests.cli.rungs import node_of
from tests.cli.test_old_run import old
from tests.core.test_ledger import START, account

__all__ = ["old"]


def args_of(*words: str) -> RunArgs:
    return parse_run_args([*words, "--no-python", "true"], {})


def counts_runs(*words: str) -> bool:
    """Whether past runs are a reason for the number of standbys."""
    args, why = choose_standbys(args_of(*words))
    assert args.standbys == 1 and why
    return re.search(r"of \d+ past runs?", why) is not None


def test_a_number_is_taken_as_it_is() -> None:
    args = args_of("--nnodes", "4", "--standbys", "2")
    assert choose_standbys(args) == (args, "")


def test_without_runs_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    args, why = choose_standbys(args_of("--nnodes", "4", "--standbys", "auto"))
    assert (args.standbys, args.refill_h) == (1, None)
    assert_screens("standbys", {"no run has ended": why})


def test_runs_of_an_older_version_count(old: Path) -> None:
    runs = old / "home" / "runs"
    runs.mkdir(parents=True)
    for path in old.glob("*/journal.db"):
        shutil.copytree(path.parent, runs / path.parent.name)
    _, why = choose_standbys(args_of("--nnodes", "2", "--standbys", "auto:0.5"))
    assert re.match(r"1 standby: 0 nodes lost in 0\.\d+ node-hours of 1 past run \(", why), why  # the other has no end
    assert not counts_runs("--fleet", "join", "--master-addr", "h", "--standbys", "auto")
    for path in runs.glob("*/journal.db"):
        path.write_bytes(b"not a journal")
    assert not counts_runs("--standbys", "auto")


def test_a_journal_that_takes_too_long_to_read_does_not_count(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = old / "home" / "runs"
    runs.mkdir(parents=True)
    [path] = [path for path in old.glob("*/journal.db") if (path.parent / "exit.json").exists()]
    shutil.copytree(path.parent, runs / path.parent.name)
    given: list[Entry] = []

    def read_slowly(journal: SqliteJournal) -> Iterator[Entry]:
        for n in range(100):
            given.append(Entry(seq=n + 1, at=float(n), event=Tick(), decision=Decision()))
            yield given[-1]

    monkeypatch.setattr(standby_count, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(SqliteJournal, "read", read_slowly)
    assert not counts_runs("--standbys", "auto")
    assert 1 < len(given) < 10, "a second for each: it stops after five"


@pytest.mark.parametrize("departed", ["", " departed"])
def test_time_in_which_nobody_watched_or_the_job_was_over_does_not_count(departed: str) -> None:
    ended = ("7290 progress 4000 at 3600 from 1 since 5 parted", f"7290 ended n0{departed}", "7290 outcome 2000001 ok")
    found = account(*START, "7290 successor 2 alone 27", *ended)
    assert found.spent_s(TimeUse.OVER if departed else TimeUse.UNWATCHED) == 3690
    assert add_run(NodeLosses(), found, 4) == NodeLosses(runs=1, lost=0, node_h=4.0)


def test_on_joined_hosts_a_node_may_have_any_rank() -> None:
    args = args_of("--nnodes", "2", "--standbys", "auto", "--rdzv-endpoint", "h:1", "--node-rank", "7")
    assert (args.node_rank, args.standbys, args.refill_h) == (7, 1, 24.0)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_node_that_a_run_lost_counts_in_the_next(start: Start) -> None:
    first = start("--nnodes", "2", "--standbys", "auto:0.5")
    first.says("1 standby: no past run tells how often nodes are lost")
    first.trains()
    first.kill(first.holder(node_of(first, 1)))
    first.kill(first.rank(1))
    first.trains(generation=2)
    first.finish()
    first.ends(0)
    second = start("--nnodes", "2", "--standbys", "auto:0.5", "--run-dir", str(first.folder / "again"), name="again")
    told = second.says("past run (")
    second.ends(0)
    assert re.search(r"holdfast: 1 standby: 1 node lost in 0\.\d+ node-hours of 1 past run \(", told), told
