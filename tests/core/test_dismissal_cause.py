"""Why nodes are given back, as their fleets hear it: whether their machines are to blame, or nobody is."""

from itertools import count
from typing import Literal

import pytest

from holdfast.core.membership.standbys import Standbys
from holdfast.model.action import Action, Dismiss, Dismissal, Probe
from holdfast.model.decider_events import Order, Outcome, Ready
from holdfast.model.decider_limits import Limits
from holdfast.model.detector_alarm import Kind
from holdfast.model.fleet_node_reports import FleetNode, FleetState
from holdfast.model.job_and_seats import Job
from holdfast.model.job_phase import Phase
from tests.core.test_fleet_news import Play, up


def standbys(*, probes: bool = False, checks: bool = False) -> Standbys:
    job = Job(run_id="r", min_nodes=1, max_nodes=1, probes=probes, checks=checks)
    return Standbys(job, Limits(), count(1))


def only_cause(actions: tuple[Action, ...] | list[Action]) -> Dismissal:
    [found] = [action.cause for action in actions if isinstance(action, Dismiss)]
    return found


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (None, Dismissal.EVICTED),
        (FleetNode(state=FleetState.UNKNOWN), Dismissal.EVICTED),
        (FleetNode(state=FleetState.GONE, failed=True), Dismissal.EVICTED),
        (FleetNode(state=FleetState.GONE, reason="preempted"), Dismissal.GONE),
    ],
)
def test_an_eviction_blames_the_machine_unless_the_fleet_knows_better(seen: FleetNode | None, cause: Dismissal) -> None:
    unseated = standbys()
    if seen:
        unseated.take_report(0.5, {"n0": seen})
    assert only_cause(unseated.evict_node("n0", Kind.SILENCE, 1, examine=False)) is cause


@pytest.mark.parametrize(("failed", "cause"), [({"n0": "gemm"}, Dismissal.EVICTED), ({}, Dismissal.SPARE)])
def test_an_examination_blames_the_machine_if_something_is_wrong_with_it(
    failed: dict[str, str], cause: Dismissal
) -> None:
    unseated = standbys(probes=True)
    unseated.on_ready(Ready(node="n0", nproc=1, host="h0"), 0)
    unseated.admit_node("n0")
    unseated.evict_node("n0", Kind.CRASH, 1, examine=True)
    [probe] = unseated.examine_evicted(frozenset())
    _, actions = unseated.on_examined(1.0, Outcome(action=probe.id, ok=True, failed=failed))
    assert only_cause(actions) is cause


def test_a_failed_check_blames_the_machine() -> None:
    unseated = standbys(checks=True)
    [probe] = unseated.on_ready(Ready(node="n0", nproc=1, host="h0"), 1)
    assert isinstance(probe, Probe)
    _, actions = unseated.on_checked(1.0, Outcome(action=probe.id, ok=True, failed={"n0": "gemm"}))
    assert only_cause(actions) is Dismissal.EVICTED


def test_a_node_that_never_reports_is_late() -> None:
    unseated = standbys()
    unseated.coming["n0"] = 0.0
    assert only_cause(unseated.tick(1e6)) is Dismissal.LATE


@pytest.mark.parametrize(("verb", "cause"), [("evict", Dismissal.EVICTED), ("drain", Dismissal.DRAINED)])
@pytest.mark.parametrize("seated", [True, False])
def test_a_person_who_evicts_a_node_has_a_reason_and_one_who_drains_it_has_none(
    verb: Literal["evict", "drain"], cause: Dismissal, seated: bool
) -> None:
    play = Play(standbys=1)
    play.train(1.0, "a", "b")
    play.ready(2.0, "c")
    actions = play.hear(3.0, Order(verb=verb, who="me", node="a" if seated else "c"))
    if seated:
        assert play.phase() is Phase.PAUSING
        actions = play.hear(4.0, Outcome(action=play.view.awaited, ok=True))
    assert only_cause(actions) is cause


def test_a_node_that_the_fleet_takes_away_is_drained() -> None:
    play = Play()
    play.train(1.0, "a", "b")
    play.survey(2.0, a=up(), b=up())
    play.survey(10.0, a=up(ends_at=130.0, reason="preempted"))
    play.give(11.0, "c")
    play.ready(30.0, "c")
    assert only_cause(play.hear(31.0, Outcome(action=play.view.awaited, ok=True))) is Dismissal.DRAINED
