"""What training is expected of a plan in a time to come, and that plans are weighed by it."""

from random import Random

import msgspec
import pytest

from holdfast.core.elastic.expected_liveput import Liveput, LossOutlook, expected_liveput
from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.layer_owners import Held
from holdfast.core.elastic.loss_forecast import LossForecast, LossHistory, forecast_losses
from holdfast.core.elastic.plan_choice import POLICIES, choose_plan, cost_of, forecast_liveput
from holdfast.core.elastic.plan_ground import survey
from holdfast.core.elastic.proposal import PhaseCosts, Proposal
from holdfast.model.pipeline_routes import PipelineJob
from tests.core.elastic import situations

JOB = PipelineJob(layers=4, microbatches=8, stages=2)
OFTEN, NEVER = LossForecast(50.0, 50 * 36000.0), LossForecast(1e-9, 1e9)  # a worker is lost in ten hours; never
TWICE: Held = ((0, 1), (2, 3), (0, 1), (2, 3))
ONCE: Held = ((0,), (1,), (2,), (3,))


def liveput(job: PipelineJob, held: Held, rate: float, forecast: LossForecast, live_s: float = 5.0) -> Liveput:
    outlook = LossOutlook(forecast=forecast, ahead_s=3600.0, live_s=live_s, rollback_s=1500.0, unsaved_s=900.0)
    return expected_liveput(job, held, rate, outlook)


def test_nothing_strikes_if_nothing_is_forecast() -> None:
    found = liveput(JOB, TWICE, 0.8, NEVER)
    assert found.expected_s == pytest.approx(found.calm_s) == pytest.approx(0.8 * 3600)
    assert found.rollback_chance == pytest.approx(0, abs=1e-6)


def test_spare_copies_are_worth_more_the_more_losses_are_forecast() -> None:
    faster, safer = (
        [liveput(JOB, held, rate, forecast) for forecast in (NEVER, OFTEN)]
        for held, rate in ((ONCE, 1.0), (TWICE, 0.9))
    )
    assert faster[0].expected_s > safer[0].expected_s
    assert faster[1].expected_s < safer[1].expected_s
    assert faster[1].rollback_chance > 0.25 > safer[1].rollback_chance > 0


def test_it_falls_with_the_rate_and_with_prices_and_stays_below_calm() -> None:
    rng = Random(5)
    for _ in range(200):
        job, workers = situations.draw_job(rng)
        held = first_plan(job, workers).held
        rate = rng.uniform(0.2, 1)
        seen = [liveput(job, held, rate, LossForecast(3.0, one)) for one in (1e9, 1e6, 1e5)]
        dear = liveput(job, held, rate, LossForecast(3.0, 1e6), live_s=60.0)
        assert seen[0].expected_s >= seen[1].expected_s >= seen[2].expected_s
        assert all(one.expected_s <= one.calm_s and 0 <= one.rollback_chance <= 1 + 1e-9 for one in seen)
        assert dear.expected_s <= seen[1].expected_s


def test_a_plan_that_lacks_a_layer_is_worth_nothing() -> None:
    assert liveput(JOB, ((0, 1), (2,)), 1.0, NEVER).expected_s == 0


def test_a_plan_that_stands_losses_better_beats_a_faster_one() -> None:
    """Where hardly any loss is forecast one proposal costs least, and where many are, a slower one that risks less."""
    rng = Random(2)
    safer = 0
    for _ in range(400):
        job, workers = situations.draw_job(rng)
        plan = first_plan(job, workers)
        situation = situations.draw_situation(rng, job, plan, shadows=False)
        ground = survey(job, situation, PhaseCosts())
        found = [one for name in POLICIES if isinstance(one := ground.ask(POLICIES[name]), Proposal)]
        if len(found) < 2:
            continue
        calm, rough = (
            PhaseCosts(restart_s=600.0, losses=losses) for losses in (LossHistory(0, 1e10), LossHistory(80, 1e6))
        )
        orders = [[cost_of(job, situation, costs, one) for one in found] for costs in (calm, rough)]
        best = [found[one.index(min(one))] for one in orders]
        chances = [forecast_liveput(job, situation, rough, one).rollback_chance for one in best]
        safer += chances[1] < chances[0] and best[1].rate_after <= best[0].rate_after
    assert safer > 3


def test_all_who_know_the_same_weigh_the_same() -> None:
    rng = Random(9)
    for _ in range(60):
        job, workers = situations.draw_job(rng)
        situation = situations.draw_situation(rng, job, first_plan(job, workers), shadows=False)
        costs = PhaseCosts(losses=LossHistory(4, 5e5))
        copies = msgspec.json.decode(msgspec.json.encode(costs), type=PhaseCosts)
        one, other = choose_plan(job, situation, costs), choose_plan(job, situations.copied(situation), copies)
        assert msgspec.json.encode(one) == msgspec.json.encode(other)
        assert forecast_losses(LossHistory(4, 5e5)).rate > 0
