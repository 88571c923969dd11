"""New templates: workers of broken pipelines form new pipelines, of unequal sizes if that is fastest. Most pipelines
that have lost no worker stay as they are."""

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.core.elastic.first_plan import straight_route
from holdfast.core.elastic.layer_owners import transfers_to
from holdfast.core.elastic.pipeline_templates import (
    Cuts,
    PipelineTemplate,
    choose_sizes,
    make_templates,
    share_microbatches,
)
from holdfast.core.elastic.plan_ground import PlanGround, broken_routes, live_proposal, refuse_orphans, survey
from holdfast.core.elastic.proposal import Infeasible, PhaseCosts, Proposal
from holdfast.core.elastic.route_times import Route, count_routes
from holdfast.core.elastic.slot_assignment import assign_slots
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan

RETEMPLATE = "retemplate"
_BORROWED = 2  # whole pipelines, at most, that are taken apart so that the others' rest is of use


class PipelineRow(msgspec.Struct, frozen=True):
    """A pipeline: the worker of each stage, and the layers of each stage."""

    members: tuple[int, ...]
    cuts: Cuts

    def bottleneck(self, ground: PlanGround) -> float:
        return max(self._stage_times(ground))

    def fill(self, ground: PlanGround) -> float:
        times = self._stage_times(ground)
        return sum(times) - max(times)

    def _stage_times(self, ground: PlanGround) -> list[float]:
        return [ground.times.segment_time(segment) for segment in straight_route(list(self.cuts), self.members)]


def propose_retemplate(job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts) -> Proposal | Infeasible:
    """Propose pipelines of unequal sizes over all workers that stay; a faster pipeline gets more microbatches."""
    ground = survey(job, situation, costs)
    if refused := refuse_orphans(RETEMPLATE, ground):
        return refused
    whole, rest = split_pipelines(ground)
    templates = make_templates(job, ground.times.until, len(situation.held))
    limit = job.pipelines * job.stages or len(situation.held)
    options = []
    for borrowed in range(min(_BORROWED, len(whole)) + 1):
        kept = whole[: len(whole) - borrowed]
        pool = sorted(rest + [member for row in whole[len(kept) :] for member in row.members])
        room = min(len(pool), limit - sum(len(row.members) for row in kept))
        options.append((kept, pool, choose_sizes(templates, max(0, room), job.stages)))
    kept, pool, sizes = max(options, key=lambda one: round(_pace(ground, one[0], one[2], templates), 9))
    rows = kept + _seat_rows(ground, pool, [templates[size] for size in sizes])
    if not rows:
        return Infeasible(policy=RETEMPLATE, reason=f"{len(pool)} workers are too few for all layers")
    return _template_proposal(ground, rows[: job.microbatches])


def split_pipelines(ground: PlanGround) -> tuple[list[PipelineRow], list[int]]:
    """Return the unbroken pipelines with workers of their own, the busiest first, and all other workers that stay."""
    situation = ground.situation
    counted = count_routes(ground.before.routes)
    broken = broken_routes(ground.before.routes, situation.held, situation.leaving)
    taken: set[int] = set()
    whole = []
    for route, _ in sorted(counted, key=lambda one: -one[1]):
        members = [segment.worker for segment in route]
        if id(route) in broken or len(set(members)) < len(members) or not taken.isdisjoint(members):
            continue
        taken.update(members)
        cuts = tuple((segment.first, segment.end) for segment in route)
        whole.append(PipelineRow(members=tuple(members), cuts=cuts))
    stay = [n for n in range(len(situation.held)) if n not in taken and n not in situation.leaving]
    return whole, stay


def _pace(
    ground: PlanGround, kept: Iterable[PipelineRow], sizes: Iterable[int], templates: dict[int, PipelineTemplate]
) -> float:
    """Return how many microbatches all pipelines finish in one layer's time."""
    return sum(1 / row.bottleneck(ground) for row in kept) + sum(1 / templates[size].bottleneck for size in sizes)


def _seat_rows(ground: PlanGround, pool: list[int], templates: Sequence[PipelineTemplate]) -> list[PipelineRow]:
    """Return a pipeline for each template, with workers of the pool chosen so that few layers have to be sent."""
    slots = [cut for template in templates for cut in template.cuts]
    if not slots:
        return []
    sets = [frozenset(ground.situation.held[number]) for number in pool]
    lacks = [[sum(layer not in has for layer in range(*cut)) for has in sets] for cut in slots]
    members = [pool[place] for place in assign_slots(lacks)]
    rows, at = [], 0
    for template in templates:
        rows.append(PipelineRow(members=tuple(members[at : at + len(template.cuts)]), cuts=template.cuts))
        at += len(template.cuts)
    return rows


def _template_proposal(ground: PlanGround, rows: list[PipelineRow]) -> Proposal | Infeasible:
    job, situation = ground.job, ground.situation
    first_seen = _first_microbatches(ground.before.routes)
    rows = sorted(rows, key=lambda row: min(first_seen.get(member, job.microbatches) for member in row.members))
    held: list[tuple[int, ...]] = [()] * len(situation.held)
    for row in rows:
        for (first, end), member in zip(row.cuts, row.members, strict=True):
            held[member] = tuple(range(first, end))
    slowest, fills = [row.bottleneck(ground) for row in rows], [row.fill(ground) for row in rows]
    shares = share_microbatches(slowest, fills, job.microbatches)
    routes: list[Route] = []
    for row, share in zip(rows, shares, strict=True):
        routes += [straight_route(list(row.cuts), row.members)] * share
    plan = RoutePlan(
        held=tuple(held),
        routes=tuple(routes),
        transfers=transfers_to(job, situation, tuple(held)),
        resume_step=ground.resume_step,
    )
    depths = ", ".join(str(len(row.members)) for row in rows[:8])
    reason = f"{len(rows)} pipelines of {depths}{' and more' if len(rows) > 8 else ''} stages"
    return live_proposal(RETEMPLATE, ground, plan, reason=reason)


def _first_microbatches(routes: Sequence[Route]) -> dict[int, int]:
    """Return for each worker the first microbatch that it computed."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    for number, route in enumerate(routes):
        if id(route) not in seen:
            seen.add(id(route))
            for segment in route:
                found.setdefault(segment.worker, number)
    return found
