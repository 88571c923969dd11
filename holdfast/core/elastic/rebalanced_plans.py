"""Plans that share the work anew while nobody fails, by the measured speeds of workers: microbatches take other routes,
layers move along a pipeline, or a worker moves from the stage that can best spare it to the busiest one."""

from collections.abc import Iterator, Sequence

import msgspec

from holdfast.core.elastic.first_plan import straight_route
from holdfast.core.elastic.layer_owners import Held, busiest_link, fits_memory, missing_layers, transfers_to
from holdfast.core.elastic.pipeline_templates import share_microbatches
from holdfast.core.elastic.plan_ground import PlanGround, live_proposal, predict_step_s, semantics_of, survey
from holdfast.core.elastic.proposal import Phase, PhaseCosts, Proposal
from holdfast.core.elastic.route_times import Route, count_routes, loads_of, share_routes, step_time
from holdfast.core.elastic.stochastic_wiring_policy import draw_routes
from holdfast.core.elastic.template_policy import PipelineRow, propose_retemplate, split_pipelines
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, RouteSegment

REBALANCE = "rebalance"
_SEARCHED = 64  # workers, up to which it is tried what comes of a stage giving one to the busiest
_CutSoFar = tuple[float, int, tuple[tuple[int, int], ...]]  # time of the slowest stage, layers that move, the cuts
_WEIGHED = 4  # plans of which it is found out how long a step takes: those that are fastest at a first look


class RebalancedPlan(msgspec.Struct, frozen=True):
    """A plan with another division of the work, and how long its steps would take."""

    proposal: Proposal
    step_s: float

    @property
    def move_s(self) -> float:
        return sum(self.proposal.downtime_s.values())


def list_rebalanced(
    job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts
) -> tuple[float, list[RebalancedPlan]]:
    """Return how long a step takes by the plan of today, and plans that divide the work otherwise. Nobody is lost,
    leaves or joins. Unless `job.capacity` allows more, no worker gets more layers than the fullest one has now."""
    room = job.capacity or max(map(len, situation.held))
    ground = msgspec.structs.replace(survey(job, situation, costs), job=msgspec.structs.replace(job, capacity=room))
    found = {
        (plan.held, plan.routes): plan
        for plan in (_make_plan(ground, held, routes) for held, routes in _list_candidates(ground))
        if _is_other_work(ground, plan.held, plan.routes) and semantics_of(ground, plan) >= job.floor
    }
    likely = sorted(found.values(), key=lambda plan: round(_passes_time(ground, plan), 9))[:_WEIGHED]
    return predict_step_s(ground, ground.before), [_weigh(ground, plan) for plan in likely]


def _make_plan(ground: PlanGround, held: Held, routes: Sequence[Route]) -> RoutePlan:
    shared = share_routes(routes)
    return RoutePlan(held=held, routes=shared, resume_step=ground.resume_step, halves=ground.before.halves)


def _passes_time(ground: PlanGround, plan: RoutePlan) -> float:
    return step_time([(route, count) for route, count in count_routes(plan.routes) if route], ground.times)


def _is_other_work(ground: PlanGround, held: Held, routes: tuple[Route, ...]) -> bool:
    before = ground.situation.held
    same = all(bool(mine) == bool(had) for mine, had in zip(held, before, strict=True))  # standbys stay what they are
    return (held, routes) != (before, ground.before.routes) and same and fits_memory(ground.job, held)


def _list_candidates(ground: PlanGround) -> Iterator[tuple[Held, tuple[Route, ...]]]:
    """Yield what each worker would hold, and all routes."""
    job, held = ground.job, ground.situation.held
    rows, _ = split_pipelines(ground)
    if {id(row.route) for row in rows} >= {id(route) for route, _ in ground.counted if route}:
        for some in (rows, [_cut_anew(ground, row) for row in rows]):
            given = _held_by(some, held)
            yield given, _share_out(ground, rows, some)
            yield given, _exchange_rows(ground, rows, some)
    yield held, draw_routes(job, held, ground.times, ground.resume_step)
    anew = ground.ask(propose_retemplate)
    if isinstance(anew, Proposal):
        yield anew.plan.held, anew.plan.routes
    if len(held) <= _SEARCHED:
        for given in _move_workers(ground):
            yield given, draw_routes(job, given, ground.times, ground.resume_step)


def _held_by(rows: Sequence[PipelineRow], before: Held) -> Held:
    """Return what each worker holds if these are the pipelines. Workers of none of them keep what they have."""
    held = list(before)
    for row in rows:
        for segment in row.route:
            held[segment.worker] = tuple(range(segment.first, segment.end))
    return tuple(held)


def _share_out(ground: PlanGround, before: Sequence[PipelineRow], rows: Sequence[PipelineRow]) -> tuple[Route, ...]:
    """Return routes with as many microbatches on each pipeline as its speed allows. A microbatch stays on its pipeline
    if there is room, so few change."""
    slowest, fills = [row.bottleneck(ground) for row in rows], [row.fill(ground) for row in rows]
    room = share_microbatches(slowest, fills, ground.job.microbatches)
    places = {id(row.route): place for place, row in enumerate(before)}
    chosen: list[int] = []
    for route in ground.before.routes:
        place = places.get(id(route), -1)
        stays = place >= 0 and room[place] > 0
        chosen.append(place if stays else -1)
        if stays:
            room[place] -= 1
    free = [place for place, count in enumerate(room) for _ in range(count)]
    return tuple(rows[place if place >= 0 else free.pop(0)].route for place in chosen)


def _exchange_rows(ground: PlanGround, before: Sequence[PipelineRow], rows: Sequence[PipelineRow]) -> tuple[Route, ...]:
    """Return routes with each microbatch on the pipeline that it had: gradients are summed in the same heaps."""
    now = {id(was.route): row.route for was, row in zip(before, rows, strict=True)}
    return tuple(now.get(id(route), route) for route in ground.before.routes)


def _cut_anew(ground: PlanGround, row: PipelineRow) -> PipelineRow:
    """Return the pipeline with its layers cut for the speeds of its workers, who keep their order."""
    cuts = _best_cuts(ground, row)
    return PipelineRow(route=straight_route(cuts, row.members), members=row.members)


def _best_cuts(ground: PlanGround, row: PipelineRow) -> list[tuple[int, int]]:
    """Return the cuts with which the slowest stage is as fast as can be. Among equal ones, the fewest layers move.
    Every worker keeps a layer."""
    job, stages = ground.job, len(row.members)
    best: dict[int, _CutSoFar] = {0: (0.0, 0, ())}  # by layer up to which the stages so far reach
    for stage, segment in enumerate(row.route):
        later = stages - stage - 1
        ends = [job.layers] if not later else range(1, job.layers - later + 1)
        longer = {
            end: [one for first in best if (one := _add_stage(ground, best[first], segment, end))] for end in ends
        }
        best = {end: min(options) for end, options in longer.items() if options}
    return list(best[job.layers][2])


def _add_stage(ground: PlanGround, before: _CutSoFar, segment: RouteSegment, end: int) -> _CutSoFar | None:
    """Return the cuts with one more stage, of the worker of `segment`, that ends before layer `end`."""
    slowest, moved, cuts = before
    first = cuts[-1][1] if cuts else 0
    if not first < end <= first + ground.job.capacity:
        return None
    took = ground.times.segment_time(RouteSegment(segment.worker, first, end))
    gets = (end - first) - max(0, min(end, segment.end) - max(first, segment.first))
    return (round(max(slowest, took), 9), moved + gets, (*cuts, (first, end)))


def _move_workers(ground: PlanGround) -> Iterator[Held]:
    """Yield what workers would hold if one of them gave up its layers, of which there are other owners, and took those
    of the busiest worker."""
    held, speeds = ground.situation.held, ground.situation.speeds
    kinds: dict[tuple[int, ...], list[int]] = {}
    for worker, mine in enumerate(held):
        if mine:
            kinds.setdefault(mine, []).append(worker)
    loads = loads_of([(route, count) for route, count in ground.counted if route], ground.times)
    busiest = held[max(loads, key=lambda worker: (round(loads[worker], 9), -worker))]
    for mine, members in kinds.items():
        ordered = sorted(members, key=lambda worker: (speeds[worker] if speeds else 1.0, worker))
        for giver in dict.fromkeys([ordered[0], ordered[-1]]):
            given = tuple(busiest if worker == giver else had for worker, had in enumerate(held))
            if mine != busiest and not missing_layers(ground.job, given):
                yield given


def _weigh(ground: PlanGround, plan: RoutePlan) -> RebalancedPlan:
    """Return the plan with what it costs: no groups are made anew, and without transfers nothing has to be compared."""
    costs, situation = ground.costs, ground.situation
    transfers = transfers_to(ground.job, situation, plan.held)
    plan = msgspec.structs.replace(plan, transfers=transfers)
    reason = f"{len(transfers)} layers move" if transfers else "microbatches take other routes"
    found = live_proposal(REBALANCE, ground, plan, reason=reason, kappa=costs.kappa)
    assert isinstance(found, Proposal), found
    downtime: dict[Phase, float] = {"plan": costs.plan_s}
    if transfers:
        downtime |= {"move": busiest_link(transfers) * costs.transfer_s, "verify": costs.verify_s}
    return RebalancedPlan(msgspec.structs.replace(found, downtime_s=downtime), predict_step_s(ground, plan))
