"""Follows a plan as workers would, without a line of the policies' own code, and says what goes wrong."""

from itertools import combinations

from holdfast.core.elastic.proposal import Proposal
from holdfast.model.pipeline_routes import PipelineJob, PipelineSituation, RoutePlan, Semantics

# By worker: layer -> the step whose state it is.
States = list[dict[int, int]]


def faults_of(job: PipelineJob, situation: PipelineSituation, proposal: Proposal) -> list[str]:
    states: States = [dict.fromkeys(mine, situation.committed) for mine in situation.held]
    for mine, more in zip(states, situation.shadows, strict=False):
        mine.update(dict.fromkeys(more, situation.committed))
    faults = follow(job, situation, proposal.plan, states)
    left_out = sum(not route for route in proposal.plan.routes)
    if left_out and proposal.semantics is not Semantics.BATCH_CHANGED:
        faults.append("microbatches are missing")
    summed = proposal.semantics is Semantics.EXACT and not job.ordered and situation.earlier is not None
    if summed and situation.earlier and heaps(job, situation.earlier) != heaps(job, proposal.plan):
        faults.append("other sums of floats are called exact")
    if not 0 < proposal.rate_after <= 1:
        faults.append(f"rate {proposal.rate_after}")
    if any(seconds < 0 for seconds in proposal.downtime_s.values()):
        faults.append("a phase of negative length")
    return faults + broken_promises(job, situation, proposal)


def follow(job: PipelineJob, situation: PipelineSituation, plan: RoutePlan, states: States) -> list[str]:
    """Bring all states to what the plan says, then walk every route; and the same for what follows it."""
    faults = []
    ready = plan.resume_step - 1
    if plan.rollback:
        for number, mine in enumerate(plan.held):
            for layer in mine:
                source = plan.sources[layer]
                kept = situation.snapshots[source] if source >= 0 else ((layer, situation.stored),)
                states[number][layer] = ready if (layer, ready) in kept else -2
    else:
        sent = [(t.target, t.layer, states[t.source].get(t.layer, -2)) for t in plan.transfers]
        for target, layer, step in sent:
            states[target][layer] = step
    for layer, number in enumerate(plan.saves):
        if states[number].get(layer) != ready:
            faults.append(f"{number} cannot save layer {layer}")
    for number, mine in enumerate(plan.held):
        faults += [
            f"{number} has layer {la} of step {states[number].get(la)}"
            for la in mine
            if states[number].get(la) != ready
        ]
        if job.capacity and len(mine) > job.capacity:
            faults.append(f"{number} holds too much")
    if len(plan.routes) != job.microbatches:
        faults.append("not as many routes as microbatches")
    for route in plan.routes:
        passed = [layer for segment in route for layer in range(segment.first, segment.end)]
        if route and passed != list(range(job.layers)):
            faults.append(f"a microbatch passes layers {passed}")
        faults += [
            f"{s.worker} computes layer {layer}"
            for s in route
            for layer in range(s.first, s.end)
            if s.worker < 0 or layer not in plan.held[s.worker]
        ]
    if plan.then is not None:
        moved = plan.then.resume_step - 1
        later = [dict.fromkeys(mine, moved) for mine in plan.held]
        faults += follow(job, situation, plan.then, later)
    return faults


def heaps(job: PipelineJob, plan: RoutePlan) -> set[tuple[int, frozenset[int]]]:
    """The parts that each layer's sum of gradients has: which microbatches one worker adds up."""
    found: dict[tuple[int, int], set[int]] = {}
    for number, route in enumerate(plan.routes):
        for segment in route:
            for layer in range(segment.first, segment.end):
                found.setdefault((layer, segment.worker), set()).add(number)
    return {(layer, frozenset(heap)) for (layer, _), heap in found.items()}


def broken_promises(job: PipelineJob, situation: PipelineSituation, proposal: Proposal) -> list[str]:
    """What a proposal says of further losses and of memory, tried out."""
    plan = proposal.plan
    last = plan.then or plan
    stay = [n for n in range(len(last.held)) if n not in situation.leaving and (last.held[n])]
    faults = []
    if proposal.tolerance and len(stay) <= 10 and proposal.tolerance <= 3:
        for gone in combinations(stay, proposal.tolerance):
            left = {layer for n in stay if n not in gone for layer in last.held[n]}
            if len(left) < job.layers:
                faults.append(f"without {gone} a layer is lost")
    return faults
