"""Checks a plan before any worker follows it. A fault in a plan means that its policy has a bug."""

from collections.abc import Iterator

from holdfast.core.elastic.layer_owners import HeldRuns, fits_memory
from holdfast.core.elastic.route_times import Route, count_routes
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, Semantics


def plan_faults(job: PipelineJob, situation: PipelineSituation, plan: RoutePlan, semantics: Semantics) -> Iterator[str]:
    """Yield the faults of a plan: work for a worker without the layers, copies from a worker without them, or too many
    layers on one worker."""
    if len(plan.held) != len(situation.held):
        yield f"it has {len(plan.held)} workers, and {len(situation.held)} are there"
        return
    yield from _state_faults(job, situation, plan)
    yield from _route_faults(job, plan, semantics)
    if not fits_memory(job, plan.held):
        yield f"a worker holds more than {job.capacity} layers"
    if plan.then is not None:
        if plan.then.resume_step <= plan.resume_step:
            yield "what follows does not begin later"
        after = PipelineSituation(committed=plan.then.resume_step - 1, held=plan.held)
        yield from (f"then: {fault}" for fault in plan_faults(job, after, plan.then, semantics))


def _state_faults(job: PipelineJob, situation: PipelineSituation, plan: RoutePlan) -> Iterator[str]:
    if plan.rollback:
        yield from _rollback_faults(job, situation, plan)
        return
    if plan.resume_step != situation.committed + 1:
        yield f"it resumes at step {plan.resume_step}, and {situation.committed} is committed"
    has = situation.held
    if situation.shadows:
        has = tuple((*mine, *more) for mine, more in zip(has, situation.shadows, strict=True))
    sent: dict[int, set[int]] = {}
    for transfer in plan.transfers:
        if transfer.layer not in has[transfer.source]:
            yield f"worker {transfer.source} is to send layer {transfer.layer}, which it has not"
        sent.setdefault(transfer.target, set()).add(transfer.layer)
    for number, (mine, had) in enumerate(zip(plan.held, situation.held, strict=True)):
        if mine != had and (lacks := sorted(set(mine).difference(has[number], sent.get(number, ())))):
            yield f"worker {number} is to hold layers {lacks}, which it does not get"
    if plan.saves and not (
        len(plan.saves) == job.layers and all(layer in has[number] for layer, number in enumerate(plan.saves))
    ):
        yield "a layer is to be saved by who has it not"


def _rollback_faults(job: PipelineJob, situation: PipelineSituation, plan: RoutePlan) -> Iterator[str]:
    step = plan.resume_step - 1
    if step > situation.committed:
        yield f"it goes back to step {step}, and only {situation.committed} is committed"
    if len(plan.sources) != job.layers or plan.transfers:
        yield "a rollback needs one source of each layer, and no transfers"
        return
    for layer, source in enumerate(plan.sources):
        kept = situation.snapshots[source] if 0 <= source < len(situation.snapshots) else ()
        if not (step == situation.stored if source == -1 else (layer, step) in kept):
            yield f"layer {layer} is not kept by {source} as it was at step {step}"


def _route_faults(job: PipelineJob, plan: RoutePlan, semantics: Semantics) -> Iterator[str]:
    if len(plan.routes) != job.microbatches:
        yield f"it has {len(plan.routes)} microbatches, and a step has {job.microbatches}"
    runs = HeldRuns(plan.held)
    for route, count in count_routes(plan.routes):
        if not route and semantics is not Semantics.BATCH_CHANGED:
            yield f"{count} microbatches are left out"
        if fault := _route_fault(job, route, runs):
            yield fault


def _route_fault(job: PipelineJob, route: Route, runs: HeldRuns) -> str:
    at = 0
    for segment in route:
        if segment.first != at or segment.end <= at:
            return f"after layer {at} comes layer {segment.first}"
        if not segment.worker < len(runs.held) or not runs.can_compute(segment):
            return f"worker {segment.worker} computes layers that it does not hold"
        at = segment.end
    return "" if not route or at == job.layers else f"a route ends before layer {at}"
