"""Each policy in a case small enough to know the answer."""

from itertools import combinations, permutations
from random import Random

import msgspec
import pytest

from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.least_move_placement import assign_slots
from holdfast.core.elastic.pipeline_templates import choose_sizes, make_templates, share_microbatches
from holdfast.core.elastic.plan_choice import POLICIES, choose_plan
from holdfast.core.elastic.plan_ground import survey
from holdfast.core.elastic.proposal import Infeasible, PhaseCosts, Proposal
from holdfast.core.elastic.shadow_policy import shadows_of
from holdfast.model.pipeline_routes import (
    LayerTransfer,
    PipelineJob,
    PipelineSituation,
    RoutePlan,
    RouteSegment,
    Semantics,
)
from tests.core.elastic.situations import renumber

COSTS = PhaseCosts()


def losing(
    job: PipelineJob, workers: int, gone: list[int], fresh: int = 0, plan: RoutePlan | None = None
) -> PipelineSituation:
    """A job that has lost these workers after step 7, as `fresh` others came."""
    plan = plan or first_plan(job, workers)
    stay = [number for number in range(workers) if number not in gone]
    earlier = renumber(plan, stay, gone, fresh)
    lost = tuple(plan.held[number] for number in gone)
    return PipelineSituation(committed=7, held=earlier.held, earlier=earlier, lost=lost)


def proposed(name: str, job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts = COSTS) -> Proposal:
    found = POLICIES[name](survey(job, situation, costs))
    assert isinstance(found, Proposal), found
    return found


def grid(pipelines: int, stages: int = 4, each: int = 8, **more: object) -> PipelineJob:
    job = PipelineJob(layers=2 * stages, microbatches=each * pipelines, stages=stages, pipelines=pipelines)
    return msgspec.structs.replace(job, **more)


def test_the_first_plan_has_whole_pipelines_and_standbys() -> None:
    plan = first_plan(PipelineJob(layers=6, microbatches=5, stages=2), 5)
    assert plan.held == ((0, 1, 2), (3, 4, 5), (0, 1, 2), (3, 4, 5), ())
    assert [route[0].worker for route in plan.routes] == [0, 0, 2, 2, 2]
    assert plan.routes[0] == (RouteSegment(0, 0, 3), RouteSegment(1, 3, 6))
    with pytest.raises(ValueError, match="more than 2"):
        first_plan(PipelineJob(layers=6, microbatches=5, stages=2, capacity=2), 4)


def test_a_standby_takes_the_place_and_the_bits_stay() -> None:
    job = grid(3)
    found = proposed("replace", job, losing(job, 12, [5], fresh=1))
    assert found.semantics is Semantics.EXACT and found.rate_after == 1 and found.tolerance == 2
    assert {(t.layer, t.target) for t in found.plan.transfers} == {(2, 11), (3, 11)}
    assert len({t.source for t in found.plan.transfers}) == 2, "two owners share the sending"


def test_without_a_standby_there_is_no_replacement() -> None:
    job = grid(3)
    assert isinstance(POLICIES["replace"](survey(job, losing(job, 12, [5]), COSTS)), Infeasible)


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("losses", [1, 2])
def test_rerouting_is_as_fast_as_the_formula_says(kappa: float, losses: int) -> None:
    """(M+P-1) / max(M+P-1, M D/(D-k) + kappa (P-1)), for k losses of one stage and M microbatches to a pipeline."""
    depth, pipelines, each = 4, 4, 12
    job = grid(pipelines, depth, each)
    situation = losing(job, depth * pipelines, [1 + depth * d for d in range(losses)])
    found = proposed("reroute", job, situation, msgspec.structs.replace(COSTS, kappa=kappa))
    whole = each + depth - 1
    slow = each * pipelines / (pipelines - losses) + kappa * (depth - 1)
    assert found.rate_after == pytest.approx(whole / max(whole, slow))
    assert found.plan.transfers == () and found.semantics is Semantics.FP_ORDER


def test_dropping_is_as_fast_as_the_formula_says() -> None:
    job = grid(4, 4, 12)
    found = proposed("drop", job, losing(job, 16, [1]))
    assert found.rate_after == pytest.approx((12 + 3) / (12 * 4 / 3 + 3))
    free = grid(8, 4, 2, floor=Semantics.BATCH_CHANGED)  # another microbatch takes longer than one pipeline is worth
    smaller = proposed("drop", free, losing(free, 32, [1]))
    assert smaller.semantics is Semantics.BATCH_CHANGED and smaller.rate_after == pytest.approx(7 / 8)
    assert sum(not route for route in smaller.plan.routes) == 2


def test_with_microbatches_in_order_any_routes_have_the_same_bits() -> None:
    job = grid(3, ordered=True)
    for name in ("reroute", "retemplate", "drop", "hybrid", "stochastic wiring"):
        assert proposed(name, job, losing(job, 12, [5])).semantics is Semantics.EXACT


def test_new_templates_use_whoever_is_left() -> None:
    job = grid(2, capacity=3)
    found = proposed("retemplate", job, losing(job, 8, [6]))
    depths = sorted(len(route) for route in set(found.plan.routes))
    assert depths == [3, 4] and found.tolerance == 1
    back = losing(job, 7, [], fresh=1, plan=found.plan)
    again = proposed("retemplate", job, back)
    assert again.rate_after == 1 and sorted(map(len, set(again.plan.routes))) == [4, 4]


def test_the_predecessor_takes_over_what_it_shadows() -> None:
    job = grid(2)
    plan = first_plan(job, 8)
    situation = msgspec.structs.replace(losing(job, 8, [1, 5]), shadows=())
    assert isinstance(POLICIES["redundant layers"](survey(job, situation, COSTS)), Infeasible)
    shadows = tuple(shadows_of(plan)[number] for number in (0, 2, 3, 4, 6, 7))
    found = proposed("redundant layers", job, msgspec.structs.replace(situation, shadows=shadows))
    assert found.plan.held[0] == found.plan.held[3] == (0, 1, 2, 3) and found.plan.transfers == ()
    assert found.semantics is Semantics.EXACT and found.extra_memory == 2


def test_routes_are_drawn_by_the_seed_and_the_faster_get_more() -> None:
    job = grid(2, 2, 40, seed=1)
    situation = msgspec.structs.replace(losing(job, 4, []), speeds=(1.0, 1.0, 3.0, 1.0))
    one, same = (proposed("stochastic wiring", job, situation).plan for _ in range(2))
    other = proposed("stochastic wiring", msgspec.structs.replace(job, seed=2), situation).plan
    assert one == same and one.routes != other.routes
    firsts = [route[0].worker for route in one.routes]
    assert firsts.count(2) == pytest.approx(60, abs=2) and firsts.count(0) == pytest.approx(20, abs=2)


def test_layers_leave_before_their_owner_does() -> None:
    job = grid(2)
    situation = msgspec.structs.replace(losing(job, 8, [], fresh=1), leaving=(3,))
    choice = choose_plan(job, situation, COSTS)
    assert choice.chosen is not None and choice.chosen.policy == "live migration"
    assert choice.chosen.plan.held[3] == () and choice.chosen.plan.held[8] == (6, 7)
    assert choice.chosen.downtime_s["detect"] == 0


def test_all_is_saved_if_all_will_leave() -> None:
    job = grid(2)
    situation = msgspec.structs.replace(losing(job, 8, []), leaving=tuple(range(8)), stored=0)
    choice = choose_plan(job, situation, COSTS)
    assert choice.chosen is not None and choice.chosen.policy == "just-in-time save"
    assert all(layer in situation.held[number] for layer, number in enumerate(choice.chosen.plan.saves))


def test_the_first_part_of_a_hybrid_drops_and_the_second_replaces() -> None:
    job = grid(4, floor=Semantics.FP_ORDER)
    costs = msgspec.structs.replace(COSTS, rebuild_s=60.0, step_s=10.0, warm_s=30.0)
    choice = choose_plan(job, losing(job, 16, [5], fresh=1), costs)
    assert choice.chosen is not None and choice.chosen.policy == "hybrid"
    plan = choice.chosen.plan
    assert plan.then is not None and plan.then.transfers and not plan.transfers
    assert plan.then.resume_step - plan.resume_step == choice.chosen.slow_steps > 1
    assert 4 not in {segment.worker for route in plan.routes for segment in route}, "its pipeline stands"
    short = msgspec.structs.replace(costs, rebuild_s=0.1, regroup_s=0.1, warm_s=0.0)
    quick = choose_plan(job, losing(job, 16, [5], fresh=1), short).chosen
    assert quick is not None and quick.policy in ("replace", "retemplate")


def test_without_an_owner_all_go_back_to_what_is_kept() -> None:
    job = grid(2)
    situation = losing(job, 8, [1, 5], fresh=2)
    assert choose_plan(job, situation, COSTS).chosen is None
    kept = tuple(((layer, 6),) for layer in range(8))
    memory = choose_plan(job, msgspec.structs.replace(situation, stored=3, snapshots=kept), COSTS).chosen
    assert memory is not None and memory.policy == "memory rollback" and memory.lost_steps == 1
    assert memory.plan.sources == tuple(range(8)) and memory.plan.resume_step == 7
    disk = choose_plan(job, msgspec.structs.replace(situation, stored=3), COSTS).chosen
    assert disk is not None and disk.policy == "disk rollback" and disk.lost_steps == 4
    assert disk.plan.sources == (-1,) * 8


def test_phases_are_running_means() -> None:
    costs = COSTS.seen_phase("rebuild", 5.0)
    assert costs.rebuild_s == COSTS.rebuild_s + 0.25 * (5.0 - COSTS.rebuild_s)


def test_the_fewest_layers_move() -> None:
    rng = Random(4)
    for _ in range(60):
        slots, members = rng.randint(1, 4), rng.randint(4, 6)
        costs = [[rng.randint(0, 4) for _ in range(members)] for _ in range(slots)]
        found = assign_slots(costs)
        assert len(set(found)) == slots
        best = min(
            sum(costs[slot][one] for slot, one in enumerate(some)) for some in permutations(range(members), slots)
        )
        assert sum(costs[slot][one] for slot, one in enumerate(found)) == best


def test_layers_are_cut_where_the_slowest_stage_is_fastest() -> None:
    rng = Random(5)
    for _ in range(30):
        each = [rng.choice([1.0, 2.0, 5.0]) for _ in range(7)]
        until = tuple(sum(each[:end]) for end in range(8))
        for stages, template in make_templates(PipelineJob(layers=7, microbatches=1, stages=3), until, 4).items():
            best = min(
                max(until[b] - until[a] for a, b in zip((0, *cuts), (*cuts, 7), strict=True))
                for cuts in combinations(range(1, 7), stages - 1)
            )
            assert template.bottleneck == pytest.approx(best)
            assert [first for first, _ in template.cuts[1:]] == [end for _, end in template.cuts[:-1]]


def test_sizes_are_those_that_compute_most() -> None:
    job = PipelineJob(layers=8, microbatches=1, stages=4, capacity=3)
    templates = make_templates(job, tuple(float(layer) for layer in range(9)), 8)
    assert min(templates) == 3
    assert choose_sizes(templates, [2, 7], 4) == [(), (4, 3)]
    assert choose_sizes(templates, [8], 4) == [(4, 4)]
    assert choose_sizes(templates, [5], 4) == [(4,)], "five stages are no faster than four"


def test_the_last_pipeline_is_done_as_early_as_can_be() -> None:
    rng = Random(6)
    for _ in range(40):
        slow, fill = [rng.choice([1.0, 2.0, 3.0]) for _ in range(3)], [rng.choice([0.0, 4.0]) for _ in range(3)]
        count = rng.randint(1, 9)

        def last(shares: tuple[int, ...], slow: list[float] = slow, fill: list[float] = fill) -> float:
            return max((m * s + f for m, s, f in zip(shares, slow, fill, strict=True) if m), default=0.0)

        shares = tuple(share_microbatches(slow, fill, count))
        every = [(a, b, count - a - b) for a in range(count + 1) for b in range(count + 1 - a)]
        assert sum(shares) == count and last(shares) == min(map(last, every))


def test_transfers_are_of_layers_that_are_missing_alone() -> None:
    job = grid(2)
    situation = losing(job, 8, [])
    held = ((0,), *situation.held[1:])
    stale = msgspec.structs.replace(situation, held=held)
    found = proposed("replace", job, stale)
    assert found.plan.transfers == (LayerTransfer(layer=1, source=4, target=0),)
