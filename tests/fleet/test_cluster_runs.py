"""The runs that a cluster knows, from squeue's lines and from pods."""

from datetime import UTC, datetime
from typing import Any

from holdfast.fleet.cluster_runs import ClusterRunView, parse_squeue, read_pods
from holdfast.fleet.pod_reading import view_pod

SQUEUE = """\
RUNNING|4|ann|1700000100|holdfast-gpt 4|wide-n0
PENDING|1|ann|1700000200|holdfast-gpt 4|wide-n4
RUNNING|2|bob|1700000000|holdfast-gpt 4|wide-n0
CONFIGURING|8|ann|N/A|holdfast-20261118-021530-ab12
RUNNING|8|ann|1700000000|somebody-else
RUNNING|many|ann|1700000000|holdfast-odd
a line of another form
"""


def test_jobs_of_one_run_and_user_are_one_run() -> None:
    assert parse_squeue(SQUEUE) == [
        ClusterRunView(run_id="20261118-021530-ab12", running=8, waiting=0, who="ann"),
        ClusterRunView(run_id="gpt 4|wide", running=2, waiting=0, who="bob", since=1700000000.0),
        ClusterRunView(run_id="gpt 4|wide", running=4, waiting=1, who="ann", since=1700000100.0),
    ]
    assert parse_squeue("") == []


def pod(run: str, node: str, phase: str, minute: int) -> dict[str, Any]:
    labels = {"holdfast.dev/run": run, "holdfast.dev/node": node} if run else {}
    made = f"2026-11-18T02:{minute:02}:00Z"
    return {"metadata": {"name": node, "labels": labels, "creationTimestamp": made}, "status": {"phase": phase}}


def test_pods_of_one_run_are_one_run_and_those_that_have_ended_are_no_nodes() -> None:
    pods = [
        pod("b", "n0", "Running", 9),
        pod("a", "n1", "Pending", 5),
        pod("a", "n0", "Running", 3),
        pod("a", "n2", "Failed", 1),
        pod("", "stranger", "Running", 0),
    ]
    first, second = read_pods(map(view_pod, pods))
    assert (first.run_id, first.running, first.waiting) == ("a", 1, 1)
    assert first.since == datetime(2026, 11, 18, 2, 1, tzinfo=UTC).timestamp()
    assert (second.run_id, second.running, second.waiting, second.who) == ("b", 1, 0, "")
