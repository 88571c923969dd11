"""`--standbys auto`: the number follows from the journals of past runs, and the reason is said."""

import re
import shutil
from pathlib import Path

import pytest

from holdfast.cli.launch.standby_choice import choose_standbys
from holdfast.cli.run_flags.run_arguments import RunArgs, parse_run_args
from tests.cli.conftest import Start
from tests.cli.rungs import node_of
from tests.cli.test_old_run import old

__all__ = ["old"]


def args_of(*words: str) -> RunArgs:
    return parse_run_args([*words, "--no-python", "true"], {})


def test_a_number_is_taken_as_it_is() -> None:
    args = args_of("--nnodes", "4", "--standbys", "2")
    assert choose_standbys(args) == (args, "")


def test_without_runs_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    args, why = choose_standbys(args_of("--nnodes", "4", "--standbys", "auto"))
    assert (args.standbys, args.refill_h) == (1, None)
    assert why.startswith("1 standby: no past run tells") and why.endswith("within 24 h")


def test_runs_of_an_older_version_count(old: Path) -> None:
    runs = old / "home" / "runs"
    runs.mkdir(parents=True)
    for path in old.glob("*/journal.db"):
        shutil.copytree(path.parent, runs / path.parent.name)
    _, why = choose_standbys(args_of("--nnodes", "2", "--standbys", "auto:0.5"))
    assert re.match(r"1 standby: 0 nodes lost in 0\.\d+ node-hours of 1 past run \(", why), why  # the other has no end
    assert choose_standbys(args_of("--fleet", "join", "--master-addr", "h", "--standbys", "auto"))[1].startswith(
        "1 standby: no past run"
    )
    for path in runs.glob("*/journal.db"):
        path.write_bytes(b"not a journal")
    assert "no past run" in choose_standbys(args_of("--standbys", "auto"))[1]


def test_on_joined_hosts_a_node_may_have_any_rank() -> None:
    args = args_of("--nnodes", "2", "--standbys", "auto", "--rdzv-endpoint", "h:1", "--node-rank", "7")
    assert (args.node_rank, args.standbys, args.refill_h) == (7, 1, 24.0)


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
