"""When backward passes are made in two halves, and what is expected of that."""

import msgspec
import pytest

from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.plan_choice import POLICIES, choose_plan
from holdfast.core.elastic.plan_ground import predict_step_s, survey
from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan
from tests.core.elastic.situations import renumber

JOB = PipelineJob(layers=8, microbatches=16, stages=4, ordered=True, halves="auto")
MEASURED = PhaseCosts(unit_s=0.05, step_s=1.7)


def choose(job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts, policy: str = "reroute") -> RoutePlan:
    chosen = choose_plan(job, situation, costs, {policy: POLICIES[policy]}).chosen
    assert chosen is not None
    return chosen.plan


def lose(job: PipelineJob, gone: int, *, fresh: int = 0) -> PipelineSituation:
    plan = first_plan(job, 8)
    earlier = renumber(plan, [n for n in range(8) if n != gone], [gone], fresh)
    return PipelineSituation(committed=7, held=earlier.held, earlier=earlier, lost=(plan.held[gone],))


def test_halves_are_taken_while_a_worker_does_the_work_of_a_lost_one() -> None:
    assert choose(JOB, lose(JOB, 5), MEASURED).halves
    assert not choose(JOB, lose(JOB, 5, fresh=1), MEASURED, "replace").halves, "nobody has more to do than before"


def test_they_stay_while_it_lasts_and_end_with_it() -> None:
    plan = choose(JOB, lose(JOB, 5), MEASURED)
    again = PipelineSituation(committed=9, held=plan.held, earlier=plan)
    assert choose(JOB, again, MEASURED).halves
    back = renumber(plan, list(range(7)), [], 1)
    grown = PipelineSituation(committed=9, held=back.held, earlier=msgspec.structs.replace(back, halves=True))
    assert not choose(JOB, grown, MEASURED, "retemplate").halves


def test_they_are_not_taken_if_nothing_was_timed_or_if_they_cost_more_than_they_spare() -> None:
    assert not choose(JOB, lose(JOB, 5), PhaseCosts()).halves
    small = msgspec.structs.replace(MEASURED, unit_s=0.0005)
    assert not choose(JOB, lose(JOB, 5), small).halves


@pytest.mark.parametrize("wanted", ["on", "off"])
def test_what_the_user_says_holds_for_every_plan(wanted: str) -> None:
    job = msgspec.structs.replace(JOB, halves=wanted)
    for policy, fresh in (("reroute", 0), ("replace", 1), ("hybrid", 1), ("retemplate", 0)):
        plan = choose(job, lose(job, 5, fresh=fresh), MEASURED, policy)
        assert {plan.halves, (plan.then or plan).halves} == {wanted == "on"}


def test_a_step_is_expected_to_take_less_with_halves() -> None:
    expected = {}
    for wanted in ("on", "off"):
        job = msgspec.structs.replace(JOB, halves=wanted)
        ground = survey(job, lose(job, 5), MEASURED)
        expected[wanted] = predict_step_s(ground, choose(job, lose(job, 5), MEASURED))
    assert MEASURED.step_s < expected["on"] < expected["off"] - 0.1


def test_the_rate_of_rerouting_is_higher_with_halves() -> None:
    """With a third of a layer's time for weights, a third of the filling and draining stays idle."""
    rates = {}
    for wanted in ("on", "off"):
        job = msgspec.structs.replace(JOB, halves=wanted)
        chosen = choose_plan(job, lose(job, 5), MEASURED, {"reroute": POLICIES["reroute"]}).chosen
        assert chosen is not None
        rates[wanted] = chosen.rate_after
    assert rates["off"] == pytest.approx((8 + 3) / (16 + 3))
    assert rates["on"] == pytest.approx((8 + 1) / (16 + 1))
