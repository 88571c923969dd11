"""A thousand random jobs, each through several incidents: every proposal of every policy is followed by an oracle."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TypeAlias

import msgspec
import pytest

from holdfast.core.elastic import layer_owners, reroute_policy
from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.plan_choice import POLICIES, choose_plan, cost_of
from holdfast.core.elastic.plan_faults import plan_faults
from holdfast.core.elastic.plan_ground import PlanGround, survey
from holdfast.core.elastic.proposal import Infeasible, PhaseCosts, Proposal
from holdfast.core.elastic.replace_policy import propose_replace
from holdfast.model.pipeline_routes import LayerTransfer, PipelineJob, PipelineSituation, RoutePlan, Semantics
from tests.core.elastic import plain_planner, situations
from tests.core.elastic.plan_oracle import faults_of

SEEDS = 1000
Incident: TypeAlias = tuple[PipelineJob, PipelineSituation, PhaseCosts]
ROLLBACKS = {"memory rollback", "disk rollback"}


def incidents(seed: int) -> Iterator[Incident]:
    """What befalls one job: up to three incidents, with the plan that was chosen at the one before."""
    rng = Random(seed)
    job, workers = situations.draw_job(rng)
    costs = situations.draw_costs(rng, job)
    plan = first_plan(job, workers)
    for more in reversed(range(rng.choice([1, 1, 2, 3]))):
        situation = situations.draw_situation(rng, job, plan, shadows=rng.random() < 0.3)
        yield job, situation, costs
        chosen = choose_plan(job, situation, costs).chosen if more else None
        if chosen is None:
            return
        plan = chosen.plan.then or chosen.plan


def large_incidents(seed: int) -> Iterator[Incident]:
    """What befalls a job of so many pipelines that most workers are like others: two incidents."""
    rng = Random(seed)
    job, workers = situations.draw_large_job(rng)
    costs = situations.draw_costs(rng, job)
    plan = first_plan(job, workers)
    for _ in range(2):
        situation = situations.draw_large_situation(rng, plan)
        yield job, situation, costs
        chosen = choose_plan(job, situation, costs).chosen
        if chosen is None:
            return
        plan = chosen.plan.then or chosen.plan


def faults_in(seed: int, told: dict[bool, Counter[str]] | None = None) -> Iterator[str]:
    for job, situation, costs in incidents(seed):
        ground = survey(job, situation, costs)
        for name, propose in POLICIES.items():
            found = propose(ground)
            if told is not None:
                told[isinstance(found, Proposal)][name] += 1
            if isinstance(found, Infeasible):
                continue
            yield from (f"{name}: {fault}" for fault in faults_of(job, situation, found))
            yield from (f"{name}: {fault}" for fault in plan_faults(job, situation, found.plan, found.semantics))


def test_every_proposal_can_be_followed() -> None:
    told: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    assert not next(((seed, fault) for seed in range(SEEDS) for fault in faults_in(seed, told)), None)
    assert min(told[True][name] for name in POLICIES) > 50  # every policy proposed something, and refused something
    assert min(told[False][name] for name in POLICIES) > 50


def test_the_choice_is_the_cheapest_of_all_that_keep_the_floor() -> None:
    counted: Counter[str] = Counter()
    for seed in range(SEEDS // 8):
        for job, situation, costs in incidents(seed):
            choice = choose_plan(job, situation, costs)
            tried = [propose(survey(job, situation, costs)) for propose in POLICIES.values()]
            able = [one for one in tried if isinstance(one, Proposal) and one.semantics >= job.floor]
            if choice.chosen is None:
                assert not able
                continue
            counted[choice.chosen.policy] += 1
            mine = cost_of(job, situation, costs, choice.chosen)
            assert mine == min(cost_of(job, situation, costs, one) for one in able)
            assert len(choice.weighed) + len(choice.refused) == len(POLICIES)
            orphaned = layer_owners.missing_layers(job, situation.held)
            if orphaned:
                assert choice.chosen.policy in ROLLBACKS | {"redundant layers"}
    assert counted.keys() >= {"replace", "reroute", "retemplate", "hybrid", "live migration", *ROLLBACKS}


def test_all_who_know_the_same_choose_the_same() -> None:
    for seed in range(0, SEEDS, 20):
        for job, situation, costs in incidents(seed):
            one = choose_plan(job, situation, costs)
            other = choose_plan(job, situations.copied(situation), costs)
            assert msgspec.json.encode(one) == msgspec.json.encode(other)


def encoded_choices(incidents_of: Callable[[int], Iterator[Incident]], seeds: Iterable[int]) -> list[bytes]:
    return [msgspec.json.encode(choose_plan(*incident)) for seed in seeds for incident in incidents_of(seed)]


def compare_with_plain(incidents_of: Callable[[int], Iterator[Incident]], seeds: range) -> None:
    quick = encoded_choices(incidents_of, seeds)
    with pytest.MonkeyPatch.context() as monkeypatch:
        plain_planner.put_in_place(monkeypatch)
        plain = encoded_choices(incidents_of, seeds)
    assert len(quick) >= len(seeds)
    assert [number for number, both in enumerate(zip(quick, plain, strict=True)) if both[0] != both[1]] == []


def test_the_choice_is_the_same_if_each_worker_and_microbatch_is_looked_at_by_itself() -> None:
    compare_with_plain(incidents, range(0, SEEDS, 10))
    compare_with_plain(large_incidents, range(3))


@pytest.mark.slow
def test_every_choice_is_the_same_if_each_worker_and_microbatch_is_looked_at_by_itself() -> None:
    compare_with_plain(incidents, range(SEEDS))
    compare_with_plain(large_incidents, range(3, 30))


# --- planted bugs: each must be seen -------------------------------------------------------------------------------


def test_a_copy_from_one_that_holds_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(job: PipelineJob, situation: PipelineSituation, wanted: layer_owners.Held) -> tuple[LayerTransfer, ...]:
        sound = layer_owners.transfers_to(job, situation, wanted)
        return tuple(msgspec.structs.replace(one, source=one.target) for one in sound)

    monkeypatch.setattr("holdfast.core.elastic.replace_policy.transfers_to", wrong)
    assert any("replace" in fault for seed in range(100) for fault in _faults(seed))


def test_routes_by_the_plan_before_instead_of_live_holders_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = reroute_policy.reroute_all

    def wrong(ground: PlanGround, held: layer_owners.Held, away: tuple[int, ...] = ()) -> object:
        return real(ground, ground.before.held, away) if not ground.orphans else real(ground, held, away)

    monkeypatch.setattr(reroute_policy, "reroute_all", wrong)
    assert any("reroute" in fault for seed in range(300) for fault in _faults(seed))


def test_a_lost_microbatch_is_seen() -> None:
    def wrong(ground: PlanGround) -> Proposal | Infeasible:
        found = propose_replace(ground)
        if isinstance(found, Infeasible):
            return found
        shorter: RoutePlan = msgspec.structs.replace(found.plan, routes=((), *found.plan.routes[1:]))
        return msgspec.structs.replace(found, plan=shorter, semantics=Semantics.FP_ORDER)

    met = [incident for seed in range(20) for incident in incidents(seed) if incident[0].floor < Semantics.EXACT]
    seen = 0
    for job, situation, costs in met:
        found = wrong(survey(job, situation, costs))
        if isinstance(found, Proposal):
            seen += 1
            assert faults_of(job, situation, found)
            with pytest.raises(AssertionError):
                choose_plan(job, situation, costs, {"replace": wrong})
    assert seen > 5


def _faults(seed: int) -> list[str]:
    """Faults until the choice itself stumbles over one."""
    found: list[str] = []
    try:
        found.extend(faults_in(seed))
    except AssertionError:
        found.append("the choice refused it")
    return found
