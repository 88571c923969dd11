"""New templates: workers of broken pipelines form new pipelines, of unequal sizes if that is fastest. Most pipelines
that have lost no worker stay as they are."""

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.core.elastic.first_plan import straight_route
from holdfast.core.elastic.layer_owners import transfers_to
from holdfast.core.elastic.least_move_placement import assign_alike
from holdfast.core.elastic.pipeline_templates import (
    PipelineTemplate,
    choose_sizes,
    make_templates,
    share_microbatches,
)
from holdfast.core.elastic.plan_ground import PlanGround, live_proposal, refuse_orphans
from holdfast.core.elastic.proposal import Infeasible, Proposal
from holdfast.core.elastic.route_times import Route
from holdfast.model.pipeline_routes import RoutePlan

RETEMPLATE = "retemplate"
_BORROWED = 2  # whole pipelines, at most, that are taken apart so that the others' rest is of use


class PipelineRow(msgspec.Struct, frozen=True):
    """A pipeline: the route of its microbatches, and the worker of each stage."""

    route: Route
    members: tuple[int, ...]

    def bottleneck(self, ground: PlanGround) -> float:
        return max(ground.times.parts(self.route))

    def fill(self, ground: PlanGround) -> float:
        times = ground.times.parts(self.route)
        return sum(times) - max(times)


def propose_retemplate(ground: PlanGround) -> Proposal | Infeasible:
    """Propose pipelines of unequal sizes over all workers that stay; a faster pipeline gets more microbatches."""
    job, situation = ground.job, ground.situation
    if refused := refuse_orphans(RETEMPLATE, ground):
        return refused
    whole, rest = split_pipelines(ground)
    templates = make_templates(job, ground.times.until, len(situation.held), ground.times.send)
    limit = job.pipelines * job.stages or len(situation.held)
    counts = [len(whole) - borrowed for borrowed in range(min(_BORROWED, len(whole)) + 1)]
    pools = [sorted(rest + [member for row in whole[count:] for member in row.members]) for count in counts]
    rooms = [
        min(len(pool), limit - sum(len(row.members) for row in whole[:count]))
        for count, pool in zip(counts, pools, strict=True)
    ]
    chosen = choose_sizes(templates, [max(0, room) for room in rooms], job.stages)
    options = [(whole[:count], pool, sizes) for count, pool, sizes in zip(counts, pools, chosen, strict=True)]
    kept, pool, sizes = max(options, key=lambda one: round(_pace(ground, one[0], one[2], templates), 9))
    rows = kept + _seat_rows(ground, pool, [templates[size] for size in sizes])
    if not rows:
        return Infeasible(policy=RETEMPLATE, reason=f"{len(pool)} workers are too few for all layers")
    return _template_proposal(ground, rows[: job.microbatches])


def split_pipelines(ground: PlanGround) -> tuple[list[PipelineRow], list[int]]:
    """Return the unbroken pipelines with workers of their own, the busiest first, and all other workers that stay."""
    situation = ground.situation
    taken: set[int] = set()
    whole = []
    for route, _ in sorted(ground.counted, key=lambda one: -one[1]):
        members = [segment.worker for segment in route]
        if id(route) in ground.broken or len(set(members)) < len(members) or not taken.isdisjoint(members):
            continue
        taken.update(members)
        whole.append(PipelineRow(route=route, members=tuple(members)))
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
    held = [ground.situation.held[number] for number in pool]
    kinds = {mine: kind for kind, mine in enumerate(dict.fromkeys(held))}
    lacks = {cut: [sum(layer not in mine for layer in range(*cut)) for mine in kinds] for cut in set(slots)}
    members = [pool[place] for place in assign_alike([lacks[cut] for cut in slots], [kinds[mine] for mine in held])]
    rows, at = [], 0
    for template in templates:
        mine = tuple(members[at : at + len(template.cuts)])
        rows.append(PipelineRow(route=straight_route(list(template.cuts), mine), members=mine))
        at += len(mine)
    return rows


def _template_proposal(ground: PlanGround, rows: list[PipelineRow]) -> Proposal | Infeasible:
    job, situation = ground.job, ground.situation
    first_seen = _first_microbatches(ground.before.routes)
    rows = sorted(rows, key=lambda row: min(first_seen.get(member, job.microbatches) for member in row.members))
    held: list[tuple[int, ...]] = [()] * len(situation.held)
    runs: dict[tuple[int, int], tuple[int, ...]] = {}
    for row in rows:
        for segment in row.route:
            held[segment.worker] = runs.setdefault(
                (segment.first, segment.end), tuple(range(segment.first, segment.end))
            )
    slowest, fills = [row.bottleneck(ground) for row in rows], [row.fill(ground) for row in rows]
    shares = share_microbatches(slowest, fills, job.microbatches)
    routes: list[Route] = []
    for row, share in zip(rows, shares, strict=True):
        routes += [row.route] * share
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
