"""What every policy starts from: the plan so far, the workers lost from it, and how fast the undamaged job would be."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.layer_owners import (
    Held,
    HeldRuns,
    added_memory,
    busiest_link,
    fits_memory,
    missing_layers,
    newcomers,
    spare_copies,
)
from holdfast.core.elastic.proposal import Infeasible, Phase, PhaseCosts, Proposal
from holdfast.core.elastic.route_times import (
    LayerTimes,
    Route,
    count_routes,
    exchange_routes,
    layer_times,
    same_partition,
    share_routes,
    step_time,
)
from holdfast.core.elastic.split_pass_choice import may_gain, passes_span, split_kappa
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, RouteSegment, Semantics

Propose = Callable[["PlanGround"], Proposal | Infeasible]


class PlanGround(msgspec.Struct, frozen=True, kw_only=True):
    """A situation, with everything computed from it that all policies need."""

    job: PipelineJob
    situation: PipelineSituation
    costs: PhaseCosts
    times: LayerTimes
    before: RoutePlan  # with lost workers as negative numbers, as in the situation
    lost: Held  # by lost worker: its layers in that plan
    whole_time: float  # of a step, with all workers that there were, in units of a layer
    orphans: tuple[int, ...]  # layers that no live worker holds at the committed step
    counted: tuple[tuple[Route, int], ...]  # routes of the plan before, and how many microbatches take each
    broken: dict[int, Route]  # those that cannot be used without lost and leaving workers, by `id()`
    asked: dict["Propose", Proposal | Infeasible] = {}  # answers of policies so far

    def ask(self, propose: "Propose") -> Proposal | Infeasible:
        """Return the answer of a policy, which is asked once."""
        if propose not in self.asked:
            self.asked[propose] = propose(self)
        return self.asked[propose]

    @property
    def resume_step(self) -> int:
        return self.situation.committed + 1


def survey(job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts) -> PlanGround:
    """Return the facts that all policies start from. Raise ValueError if the situation contradicts itself."""
    _check_situation(job, situation)
    before, lost = (situation.earlier, situation.lost) if situation.earlier else _plan_as_begun(job, situation)
    before = msgspec.structs.replace(before, routes=share_routes(before.routes))
    counted = tuple(count_routes(before.routes))
    wanted = job.pipelines * job.stages or len(situation.held) + len(situation.lost)
    times = layer_times(job, costs, situation.speeds)
    whole_kappa = split_kappa(costs) if job.halves == "on" else 1.0
    return PlanGround(
        job=job,
        situation=situation,
        costs=costs,
        times=times,
        before=before,
        lost=lost,
        whole_time=_whole_time(job, wanted, costs.layer_s, costs.send_s, whole_kappa),
        orphans=tuple(missing_layers(job, situation.held)),
        counted=counted,
        broken=broken_routes(counted, HeldRuns(situation.held, situation.leaving)),
    )


def _check_situation(job: PipelineJob, situation: PipelineSituation) -> None:
    earlier, workers = situation.earlier, len(situation.held)
    if earlier is not None and (len(earlier.held) != workers or len(earlier.routes) != job.microbatches):
        raise ValueError("the earlier plan is of other workers or of other microbatches")
    if situation.speeds and len(situation.speeds) != workers:
        raise ValueError("there are not as many speeds as workers")


def _plan_as_begun(job: PipelineJob, situation: PipelineSituation) -> tuple[RoutePlan, Held]:
    """Return the plan with which the job would have begun, and the layers that lost workers would hold. The plan counts
    the lost workers as its last workers."""
    workers, lost = len(situation.held), len(situation.lost)
    whole = first_plan(job, workers + lost)
    names = {workers + number: -1 - number for number in range(lost)}
    routes = {id(route): rename_route(route, names) for route, _ in count_routes(whole.routes)}
    plan = RoutePlan(held=whole.held[:workers], routes=exchange_routes(whole.routes, routes))
    return plan, whole.held[workers:]


@lru_cache(maxsize=64)
def _whole_time(job: PipelineJob, workers: int, layer_s: tuple[float, ...], send_s: float, kappa: float) -> float:
    times = layer_times(job, PhaseCosts(layer_s=layer_s, send_s=send_s))
    return step_time(count_routes(first_plan(job, workers).routes), times, kappa)


def rename_route(route: Route, names: dict[int, int]) -> Route:
    """Return the route with its workers renamed, as the same object if no worker in it has a new name."""
    if names.keys().isdisjoint([segment.worker for segment in route]):
        return route
    return tuple([RouteSegment(names.get(s.worker, s.worker), s.first, s.end) for s in route])


def join_segments(segments: Sequence[RouteSegment]) -> Route:
    """Return the route with neighbouring segments of one worker joined."""
    found: list[RouteSegment] = []
    for segment in segments:
        if found and found[-1].worker == segment.worker:
            found[-1] = msgspec.structs.replace(found[-1], end=segment.end)
        else:
            found.append(segment)
    return tuple(found)


def broken_routes(counted: Sequence[tuple[Route, int]], runs: HeldRuns) -> dict[int, Route]:
    """Return the routes that can no longer be used, by their `id()`."""
    return {id(route): route for route, _ in counted if not route or not all(map(runs.can_compute, route))}


def refuse_orphans(policy: str, ground: PlanGround) -> Infeasible | None:
    """Return a refusal if a layer has no live owner: only a rollback brings it back. Otherwise return None."""
    return Infeasible(policy=policy, reason=name_orphans(ground.orphans)) if ground.orphans else None


def name_orphans(layers: Sequence[int]) -> str:
    more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    return f"no live worker holds layers {', '.join(map(str, layers[:8]))}{more}"


def stop_phases(ground: PlanGround) -> dict[Phase, float]:
    """Return the seconds of each phase that every change of plan takes. Nothing has to be detected or aborted if no
    worker was lost."""
    costs, forced = ground.costs, bool(ground.situation.lost)
    return {
        "detect": costs.detect_s if forced else 0.0,
        "abort": costs.abort_s if forced else 0.0,
        "agree": costs.agree_s,
        "plan": costs.plan_s,
        "rebuild": costs.rebuild_s,
    }


def rate_of(ground: PlanGround, plan: RoutePlan, kappa: float = 1.0) -> float:
    """Return the rate of samples under this plan, as a share of the whole job's rate. `kappa` is the share of a
    pipeline's filling and draining that microbatches of other pipelines cannot use."""
    if may_gain(ground.job, ground.costs, ground.before, plan):
        kappa = min(kappa, split_kappa(ground.costs))
    counted = [(route, count) for route, count in count_routes(plan.routes) if route]
    kept = sum(count for _, count in counted) / max(1, len(plan.routes))
    taken, rest = step_time(counted, ground.times, kappa), ground.costs.rest_s
    return min(1.0, (ground.whole_time + rest) / (taken + rest)) * kept if taken > 0 else 0.0


def predict_step_s(ground: PlanGround, plan: RoutePlan) -> float:
    """Return how many seconds a step will take under this plan: as long as before, but for its passes. Return 0 if the
    times of passes were not measured."""
    costs = ground.costs
    if not costs.unit_s or not ground.counted:
        return 0.0
    before, after = (_passes_time(ground, one) for one in (ground.before, plan))
    return max(0.0, costs.step_s + (after - before) * costs.unit_s)


def _passes_time(ground: PlanGround, plan: RoutePlan) -> float:
    if span := passes_span(ground.costs, ground.times, plan, halves=plan.halves):
        return span
    kappa = split_kappa(ground.costs) if plan.halves else ground.costs.kappa
    return step_time([(route, count) for route, count in count_routes(plan.routes) if route], ground.times, kappa)


def semantics_of(ground: PlanGround, plan: RoutePlan) -> Semantics:
    """Return how exactly results under this plan agree with results under the plan before it."""
    if not all(plan.routes):
        return Semantics.BATCH_CHANGED
    if ground.job.ordered or same_partition(ground.before.routes, plan.routes):
        return Semantics.EXACT
    return Semantics.FP_ORDER


def live_proposal(
    policy: str, ground: PlanGround, plan: RoutePlan, *, reason: str, kappa: float = 1.0
) -> Proposal | Infeasible:
    """Return the proposal for a plan that continues from the state in live workers; Infeasible if a worker's memory is
    too small."""
    if not fits_memory(ground.job, plan.held):
        return Infeasible(policy=policy, reason=f"a worker would hold more than {ground.job.capacity} layers")
    costs, situation = ground.costs, ground.situation
    downtime = stop_phases(ground)
    if not plan.transfers and plan.routes == ground.before.routes:
        downtime["rebuild"] = costs.regroup_s
    if plan.transfers:
        fresh = set(newcomers(situation))
        downtime["move"] = busiest_link(plan.transfers) * costs.transfer_s
        downtime["verify"] = costs.verify_s
        downtime["warm"] = costs.warm_s if any(t.target in fresh for t in plan.transfers) else 0.0
    return Proposal(
        policy=policy,
        plan=plan,
        downtime_s=downtime,
        rate_after=rate_of(ground, plan, kappa),
        extra_memory=added_memory(ground.before.held, plan.held),
        tolerance=spare_copies(ground.job.layers, plan.held, situation.leaving),
        semantics=semantics_of(ground, plan),
        reason=reason,
    )
