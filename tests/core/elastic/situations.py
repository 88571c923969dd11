"""Random jobs and what befalls them, from a seed: losses, newcomers, notices, snapshots, followed by chosen plans."""

from random import Random

import msgspec

from holdfast.core.elastic.first_plan import first_plan
from holdfast.core.elastic.proposal import PhaseCosts
from holdfast.core.elastic.shadow_policy import shadows_of
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, RouteSegment, Semantics


def draw_job(rng: Random) -> tuple[PipelineJob, int]:
    """A job and the number of workers that it begins with."""
    stages = rng.randint(1, 4)
    layers = stages * rng.randint(1, 3) + rng.randint(0, 2)
    pipelines = rng.randint(1, 4)
    widest = -(-layers // stages)
    job = PipelineJob(
        layers=layers,
        microbatches=pipelines * rng.randint(1, 4) + rng.randint(0, 2),
        stages=stages,
        pipelines=rng.choice([0, pipelines]),
        floor=rng.choice([Semantics.EXACT, Semantics.FP_ORDER, Semantics.BATCH_CHANGED]),
        ordered=rng.random() < 0.5,
        capacity=rng.choice([0, widest, widest + 1, 2 * widest]),
        seed=rng.randint(0, 9),
    )
    return job, stages * pipelines + rng.choice([0, 0, 1, 2])


def draw_costs(rng: Random, job: PipelineJob) -> PhaseCosts:
    return PhaseCosts(
        rebuild_s=rng.choice([0.1, 5.0]),
        transfer_s=rng.choice([0.01, 3.0]),
        step_s=rng.choice([0.1, 10.0]),
        kappa=rng.choice([0.0, 0.3, 1.0]),
        repair_s=rng.choice([10.0, 3600.0]),
        restart_s=rng.choice([0.0, 60.0]),
        failures_per_s=rng.choice([0.0, 1e-5]),
        warm_s=rng.choice([0.0, 20.0]),
        layer_s=tuple(rng.choice([1.0, 2.0, 0.5]) for _ in range(job.layers)) if rng.random() < 0.3 else (),
    )


def draw_situation(rng: Random, job: PipelineJob, plan: RoutePlan, shadows: bool) -> PipelineSituation:
    """What is left of a plan after some losses; possibly newcomers, stale members, notices and snapshots."""
    workers = len(plan.held)
    gone = rng.sample(range(workers), min(workers - 1, rng.choice([0, 1, 1, 1, 2, 3])))
    stay = [number for number in range(workers) if number not in gone]
    fresh = rng.choice([0, 0, 1, 2])
    committed = plan.resume_step + rng.randint(0, 5)
    held = [plan.held[number] for number in stay]
    if rng.random() < 0.1:
        held[rng.randrange(len(held))] = ()  # one that missed the last step
    count = len(stay) + fresh
    earlier = renumber(plan, stay, gone, fresh)
    snapshot = committed - rng.randint(0, 2)
    return PipelineSituation(
        committed=committed,
        held=(*held, *[()] * fresh),
        earlier=earlier if rng.random() < 0.95 else None,
        lost=tuple(plan.held[number] for number in gone),
        snapshots=tuple(_draw_snapshots(rng, job, snapshot) for _ in range(count)) if rng.random() < 0.6 else (),
        stored=rng.choice([-1, 0, committed - 3 if committed >= 3 else 0]),
        shadows=(*(shadows_of(plan)[number] for number in stay), *[()] * fresh) if shadows else (),
        speeds=tuple(rng.choice([1.0, 0.5, 2.0]) for _ in range(count)) if rng.random() < 0.2 else (),
        leaving=tuple(sorted(rng.sample(range(count), min(count, rng.choice([0, 0, 0, 1, 2]))))),
    )


def draw_large_job(rng: Random) -> tuple[PipelineJob, int]:
    """A job of many pipelines, and the number of workers that it begins with."""
    stages, pipelines = rng.randint(1, 6), rng.randint(15, 40)
    job = PipelineJob(
        layers=stages * rng.randint(1, 3) + rng.randint(0, 2),
        microbatches=pipelines * rng.randint(1, 8) + rng.randint(0, 5),
        stages=stages,
        pipelines=rng.choice([0, pipelines]),
        floor=Semantics.FP_ORDER,
    )
    return job, stages * pipelines + rng.choice([0, 1, 20])


def draw_large_situation(rng: Random, plan: RoutePlan) -> PipelineSituation:
    """What is left after one loss, some, or many: more than are assigned optimally."""
    workers = len(plan.held)
    gone = rng.sample(range(workers), rng.choice([1, 2, workers // 20, workers // 5]))
    stay = [number for number in range(workers) if number not in gone]
    rng.shuffle(stay)
    fresh = rng.choice([0, 0, 1, len(gone)])
    held = [plan.held[number] for number in stay]
    held[rng.randrange(len(held))] = ()
    count = len(stay) + fresh
    return PipelineSituation(
        committed=plan.resume_step,
        held=(*held, *[()] * fresh),
        earlier=renumber(plan, stay, gone, fresh),
        lost=tuple(plan.held[number] for number in gone),
        stored=0,
        speeds=tuple(rng.choice([1.0, 0.9, 1.1]) for _ in range(count)) if rng.random() < 0.25 else (),
        leaving=tuple(sorted(rng.sample(range(count), rng.choice([0, 0, 1, 2])))),
    )


def _draw_snapshots(rng: Random, job: PipelineJob, step: int) -> tuple[tuple[int, int], ...]:
    layers = range(job.layers) if rng.random() < 0.5 else rng.sample(range(job.layers), job.layers // 2)
    return tuple((layer, max(0, step - back)) for layer in layers for back in (0, 2))


def renumber(plan: RoutePlan, stay: list[int], gone: list[int], fresh: int) -> RoutePlan:
    """The plan in the numbers of those that stay, with newcomers behind them, and the lost as negative ones."""
    names = {number: place for place, number in enumerate(stay)} | {n: -1 - place for place, n in enumerate(gone)}
    routes = tuple(tuple(RouteSegment(names[s.worker], s.first, s.end) for s in route) for route in plan.routes)
    held = (*(plan.held[number] for number in stay), *[()] * fresh)
    return RoutePlan(held=held, routes=routes, resume_step=plan.resume_step)


def copied(situation: PipelineSituation) -> PipelineSituation:
    """The same, as it comes over a wire: equal, and no object shared."""
    return msgspec.json.decode(msgspec.json.encode(situation), type=PipelineSituation)


def begin(job: PipelineJob, workers: int) -> RoutePlan:
    return first_plan(job, workers)
