"""The parts of the planner that take alike workers, routes and pipelines together, as they are if each stands alone."""

from typing import Any

import pytest

from holdfast.core.elastic import plan_choice, plan_ground, replace_policy, reroute_policy, template_policy
from holdfast.core.elastic.layer_owners import Held, missing_layers, owners_by_layer
from holdfast.core.elastic.least_move_placement import assign_slots
from holdfast.core.elastic.pipeline_templates import PipelineTemplate
from holdfast.core.elastic.proposal import PhaseCosts, Proposal
from holdfast.core.elastic.reroute_policy import PeerWiring
from holdfast.core.elastic.route_times import Route
from holdfast.model.pipeline_routes import LayerTransfer, PipelineJob, PipelineSituation, RouteSegment


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the planner look at each worker, microbatch and pipeline by itself."""
    monkeypatch.setattr(replace_policy, "transfers_to", transfers_to)
    monkeypatch.setattr(template_policy, "transfers_to", transfers_to)
    monkeypatch.setattr(template_policy, "choose_sizes", choose_sizes)
    monkeypatch.setattr(template_policy, "share_microbatches", share_microbatches)
    monkeypatch.setattr(template_policy, "assign_alike", assign_alike)
    monkeypatch.setattr(plan_ground, "same_partition", same_partition)
    monkeypatch.setattr(plan_ground, "spare_copies", spare_copies)
    monkeypatch.setattr(plan_choice, "_next_failure_s", next_failure_s)
    monkeypatch.setattr(reroute_policy.PeerWiring, "_choose_owner", choose_owner)


def transfers_to(job: PipelineJob, situation: PipelineSituation, wanted: Held) -> tuple[LayerTransfer, ...]:
    owners = owners_by_layer(job.layers, situation.held)
    sent = [0] * len(situation.held)
    found = []
    for target, mine in enumerate(wanted):
        for layer in mine:
            if layer not in situation.held[target]:
                source = min(owners[layer], key=lambda owner: (sent[owner], owner))
                sent[source] += 1
                found.append(LayerTransfer(layer=layer, source=source, target=target))
    return tuple(found)


def choose_sizes(templates: dict[int, PipelineTemplate], rooms: list[int], wanted: int) -> list[tuple[int, ...]]:
    return [_sizes_for(templates, room, wanted) for room in rooms]


def _sizes_for(templates: dict[int, PipelineTemplate], members: int, wanted: int) -> tuple[int, ...]:
    best: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    for count in range(1, members + 1):
        options = [best[count - 1]]
        for size, template in templates.items():
            if size <= count:
                rate, alike, sizes = best[count - size]
                more = (round(rate + 1 / template.bottleneck, 9), alike + (size == wanted), (*sizes, size))
                options.append(more)
        best.append(max(options, key=lambda one: (one[0], one[1], -sum(one[2]))))
    return tuple(sorted(best[members][2], reverse=True))


def share_microbatches(bottlenecks: list[float], fills: list[float], microbatches: int) -> list[int]:
    shares = [0] * len(bottlenecks)
    done_at = [slow + fill for slow, fill in zip(bottlenecks, fills, strict=True)]
    for _ in range(microbatches):
        number = min(range(len(shares)), key=lambda one: (done_at[one], one))
        shares[number] += 1
        done_at[number] += bottlenecks[number]
    return shares


def assign_alike(costs: list[list[int]], kinds: list[int]) -> list[int]:
    return assign_slots([[row[kind] for kind in kinds] for row in costs])


def same_partition(one: tuple[Route, ...], other: tuple[Route, ...]) -> bool:
    named: dict[tuple[int, int], int] = {}
    back: dict[tuple[int, int], int] = {}
    for mine, theirs in zip(one, other, strict=True):
        if bool(mine) != bool(theirs):
            return False
        for layer, (a, b) in enumerate(zip(_owners(mine), _owners(theirs), strict=True)):
            if named.setdefault((layer, a), b) != b or back.setdefault((layer, b), a) != a:
                return False
    return True


def _owners(route: Route) -> list[int]:
    return [segment.worker for segment in route for _ in range(segment.first, segment.end)]


def spare_copies(layers: int, held: Held, leaving: tuple[int, ...] = ()) -> int:
    stay = [mine for number, mine in enumerate(held) if number not in leaving]
    return max(0, min(sum(layer in mine for mine in stay) for layer in range(layers)) - 1)


def next_failure_s(job: PipelineJob, situation: PipelineSituation, costs: PhaseCosts, proposal: Proposal) -> float:
    plan = proposal.plan
    stay = tuple(() if number in situation.leaving else mine for number, mine in enumerate(plan.held))
    only = {owners[0] for owners in owners_by_layer(job.layers, stay) if len(owners) == 1}
    alone = 1.0 if missing_layers(job, stay) else len(only) / max(1, len(plan.held))
    again = 0 if plan.saves else plan.resume_step - 1 - max(0, situation.stored)
    rollback = costs.restart_s + job.layers * costs.storage_s + max(0, again) * costs.step_s
    change_s = costs.agree_s + costs.plan_s + costs.rebuild_s + costs.transfer_s + costs.verify_s
    return costs.detect_s + costs.abort_s + change_s + alone * rollback


def choose_owner(wiring: PeerWiring, first: int, end: int) -> RouteSegment:
    able: list[tuple[Any, ...]] = []
    for owner, mine in enumerate(wiring.runs.held):
        if first in mine and owner not in wiring.runs.away:
            last = next((layer for layer in range(first, end) if layer not in mine), end)
            segment = RouteSegment(worker=owner, first=first, end=last)
            able.append((-last, wiring._load_with(segment), owner, segment))
    segment = min(able, key=lambda one: one[:3])[3]
    assert isinstance(segment, RouteSegment)
    return segment
