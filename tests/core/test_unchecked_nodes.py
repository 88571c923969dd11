"""Which nodes a job that stands takes before their checks have ended: as few as it lacks, and a minute later."""

from itertools import count

import pytest

from holdfast.core.membership.standbys import Standbys
from holdfast.core.membership.unchecked_nodes import UNCHECKED_S, UncheckedNodes, choose_unchecked
from holdfast.model.action import Probe, Say
from holdfast.model.decider_events import Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.job_and_seats import Job

BEGUN = {"a": 30.0, "b": 10.0, "c": 20.0}


@pytest.mark.parametrize(
    ("lacking", "stood_since", "nodes", "since"),
    [
        (1, 0.0, ("b",), 10.0),
        (2, 0.0, ("b", "c"), 20.0),
        (3, 0.0, ("b", "c", "a"), 30.0),
        (3, 500.0, ("b", "c", "a"), 500.0),
    ],
)
def test_who_is_checked_longest_comes_first(
    lacking: int, stood_since: float, nodes: tuple[str, ...], since: float
) -> None:
    assert choose_unchecked(BEGUN, lacking, stood_since) == UncheckedNodes(nodes=nodes, at=since + UNCHECKED_S)


def test_nobody_is_taken_unless_the_job_goes_on_with_it() -> None:
    assert choose_unchecked(BEGUN, 0, 0.0) is None, "nodes that suffice are there"
    assert choose_unchecked(BEGUN, -1, 0.0) is None
    assert choose_unchecked(BEGUN, 4, 0.0) is None, "too few even with these"
    assert choose_unchecked({}, 1, 0.0) is None


def test_a_node_that_is_taken_leaves_its_check() -> None:
    beside = Standbys(Job(run_id="r", min_nodes=1, max_nodes=1, standbys=2, checks=True), Limits(), count(1))
    for at, node in ((5.0, "a"), (7.0, "b")):
        beside.on_arrival(at, node)
        [probe] = beside.on_ready(Ready(node=node, host=node, nproc=1), 1)
        assert isinstance(probe, Probe)
    beside.on_arrival(9.0, "a")  # its agent was started again: the check goes on
    assert beside.awaiting_checks == {"a": 5.0, "b": 7.0}
    assert beside.take_unchecked(("a",), 61.4) == (
        Say(text="the job has stood for 61 s, and a could not be checked in this time: it gets ranks unchecked"),
    )
    assert (list(beside.pool), list(beside.checking.values()), beside.awaiting_checks) == (["a"], ["b"], {"b": 7.0})
