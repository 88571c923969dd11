"""What follows from what workers have: the step that counts, who holds it, and today's numbers of workers."""

import msgspec

from holdfast.client.elastic.recovery_settlement import RankReport, choose_costs, describe_situation, settle_step
from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.model.pipeline_routes import PipelineJob

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


def test_who_missed_the_newest_plan_has_no_place_in_it() -> None:
    late = msgspec.structs.replace(report(1, 4), meeting=0, plan=None)
    situation = describe_situation([report(0, 4), late], settle_step([report(0, 4), late]))
    assert situation.earlier is not None and situation.earlier.held == ((0,), ())
    assert situation.held == ((0,), (1,)), "what it holds counts all the same"


def test_costs_are_those_of_whoever_has_seen_most() -> None:
    seen = RankReport(costs=PhaseCosts(rebuild_s=0.25), incidents=2, step_s=0.5)
    assert choose_costs([RankReport(step_s=0.75), seen]) == PhaseCosts(rebuild_s=0.25, step_s=0.75)
