"""What follows from what workers have: the step that counts, who holds it, and today's numbers of workers."""

import msgspec
import pytest

from holdfast.client.elastic.pass_times import LayerPassTimes
from holdfast.client.elastic.recovery_settlement import (
    RankReport,
    choose_costs,
    compare_workers,
    describe_situation,
    find_finished,
    settle_step,
)
from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.measured_speeds import MeasuredSpeeds
from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.model.pipeline_routes import PipelineJob, RouteSegment

PLAN = first_plan(PipelineJob(layers=2, microbatches=2, stages=2), 4)
NEW = RankReport()


def report(worker: int, step: int, *, ready: int = 0, voted: int = 0) -> RankReport:
    return RankReport(
        meeting=1,
        worker=worker,
        plan=PLAN,
        layers=((worker % 2, step),),
        ready=ready,
        voted=voted,
        totals=(0.5, 0.5) if voted else (),
    )


def test_a_step_that_nobody_voted_for_is_dropped() -> None:
    settled = settle_step([report(0, 4, ready=5), report(1, 4), report(2, 4, ready=5)])
    assert (settled.committed, settled.held, settled.totals) == (4, ((0,), (1,), (0,)), ())


def test_a_step_that_one_has_seen_voted_for_is_made_by_all_who_can() -> None:
    settled = settle_step([report(0, 4, ready=5), report(1, 4, ready=5, voted=5), report(2, 4)])
    assert (settled.committed, settled.held, settled.totals) == (5, ((0,), (1,), ()), (0.5, 0.5))


def test_a_step_that_one_has_made_is_made_by_all_who_can() -> None:
    settled = settle_step([report(0, 4, ready=5), report(1, 5, ready=5, voted=5), NEW])
    assert (settled.committed, settled.held) == (5, ((0,), (1,), ()))


def test_an_earlier_plan_is_told_in_the_numbers_of_today() -> None:
    reports = [report(3, 4), NEW, report(0, 4)]
    situation = describe_situation(reports, settle_step(reports))
    assert situation.earlier is not None
    assert situation.earlier.held == ((1,), (), (0,))
    assert situation.lost == ((1,), (0,)), "of workers 1 and 2"
    assert [segment.worker for segment in situation.earlier.routes[0]] == [2, -1]
    assert [segment.worker for segment in situation.earlier.routes[1]] == [-2, 0]
    assert situation.stored == -1 and situation.held == ((1,), (), (0,))


def test_an_earlier_plan_keeps_its_halves() -> None:
    plan = msgspec.structs.replace(PLAN, halves=True)
    reports = [msgspec.structs.replace(report(worker, 4), plan=plan) for worker in (0, 1, 3)]
    situation = describe_situation(reports, settle_step(reports))
    assert situation.earlier is not None and situation.earlier.halves


def test_shares_of_passes_are_those_of_the_workers_in_the_middle() -> None:
    passes = [(LayerPassTimes(0, 1.0, 3.0, weights), LayerPassTimes(1, 2.0, 2.0, weights)) for weights in (0.0, 1.0)]
    whole, halves = (
        choose_costs([msgspec.structs.replace(report(0, 4), step_s=9.0, passes=one)], MeasuredSpeeds(unit_s=4.0))
        for one in passes
    )
    assert (whole.forward_share, whole.weights_share) == (0.375, 0.0)
    assert (halves.forward_share, halves.weights_share) == (0.375, 0.25)


def test_who_missed_the_newest_plan_has_no_place_in_it() -> None:
    late = msgspec.structs.replace(report(1, 4), meeting=0, plan=None)
    situation = describe_situation([report(0, 4), late], settle_step([report(0, 4), late]))
    assert situation.earlier is not None and situation.earlier.held == ((0,), ())
    assert situation.held == ((0,), (1,)), "what it holds counts all the same"


def test_what_was_handed_over_is_held_and_no_shadow() -> None:
    given = msgspec.structs.replace(report(0, 4), layers=((0, 4), (1, 4)), handed=(1,))
    situation = describe_situation([given, NEW], settle_step([given, NEW]))
    assert (situation.held, situation.shadows) == (((0, 1), ()), ((), ()))
    assert situation.lost == ((1,), (0,), (1,))


def test_costs_are_those_of_whoever_has_seen_most() -> None:
    seen = RankReport(costs=PhaseCosts(rebuild_s=0.25), incidents=2, step_s=0.5)
    found = choose_costs([RankReport(step_s=0.75), seen], MeasuredSpeeds())
    assert found == PhaseCosts(rebuild_s=0.25, step_s=0.75)


def test_costs_have_layers_sends_and_the_rest_of_a_step_in_one_unit() -> None:
    passes = [LayerPassTimes(0, 0.01, 0.03), LayerPassTimes(1, 0.01, 0.01)]
    timed = RankReport(step_s=1.0, rest_s=0.3, send_s=0.002, passes=(passes[0],))
    other = RankReport(step_s=1.0, rest_s=0.2, send_s=0.002, passes=(passes[1],))
    measured = compare_workers([timed, other, NEW], 2)
    found = choose_costs([timed, other, NEW], measured)
    assert (measured.speeds, found.layer_s) == ((), (1.333, 0.667))
    assert (found.unit_s, found.rest_s, found.send_s) == pytest.approx((0.03, 0.2 / 0.03, 0.004 / 0.03))
    later = choose_costs([RankReport(costs=found, incidents=1), NEW], MeasuredSpeeds())
    assert later == found, "what was measured before holds where nothing has been measured since"


def test_a_worker_that_is_slower_than_its_replica_is_told() -> None:
    reports = [RankReport(passes=(LayerPassTimes(0, s, 2 * s),)) for s in (0.01, 0.02, 0.011)]
    assert compare_workers(reports, 1).speeds == (1.0, 0.5, 1.0)


def finished(worker: int, *pairs: tuple[int, int], of: int = 5) -> RankReport:
    return msgspec.structs.replace(report(worker, 4), kept_step=of, kept=pairs)


def test_a_microbatch_is_finished_if_live_workers_have_all_of_its_gradients() -> None:
    plan = msgspec.structs.replace(PLAN, resume_step=5)
    reports = [finished(0, (0, 0), (0, 1)), finished(1, (1, 1)), NEW, finished(3, (1, 0))]
    whole = {
        0: (RouteSegment(0, 0, 1), RouteSegment(3, 1, 2)),  # of both pipelines
        1: (RouteSegment(0, 0, 1), RouteSegment(1, 1, 2)),
    }
    assert find_finished(reports, plan) == whole
    assert find_finished([*reports[:3], NEW], plan) == {1: whole[1]}, "its second half is lost"
    assert find_finished([NEW, *reports[1:]], plan) == {}


def test_what_is_finished_counts_in_its_own_step_alone() -> None:
    reports = [finished(0, (0, 0)), finished(1, (1, 0)), NEW, NEW]
    plan = msgspec.structs.replace(PLAN, resume_step=5)
    assert set(find_finished(reports, plan)) == {0}
    assert find_finished(reports, msgspec.structs.replace(plan, resume_step=6)) == {}, "it was voted for after all"
    assert find_finished(reports, msgspec.structs.replace(plan, rollback=True)) == {}
    assert find_finished(reports, msgspec.structs.replace(plan, routes=((), plan.routes[1]))) == {}, "it is left out"
    moved = msgspec.structs.replace(plan, held=((0,), (0,), (1,), (1,)))
    assert find_finished(reports, moved) == {}, "worker 1 no longer holds what it has computed"
