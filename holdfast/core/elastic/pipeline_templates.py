"""Pipeline templates: the best cut of the layers for each number of stages, and how many pipelines of each size."""

from functools import cache
from heapq import heapify, heapreplace

import msgspec

from holdfast.core.elastic.first_plan import stage_cuts
from holdfast.model.pipeline_routes import PipelineJob

Cuts = tuple[tuple[int, int], ...]


class PipelineTemplate(msgspec.Struct, frozen=True):
    """A pipeline template: the layers of each stage, and the time of the slowest stage."""

    cuts: Cuts
    bottleneck: float


def make_templates(job: PipelineJob, until: tuple[float, ...], most: int) -> dict[int, PipelineTemplate]:
    """Return the template of each size up to `most` whose stages fit into memory."""
    found = {}
    for stages in range(1, min(most, job.layers) + 1):
        cuts = _even_cuts(job, until, stages) or _best_cuts(job.layers, until, stages, job.capacity)
        if cuts is not None:
            slowest = max(until[end] - until[first] for first, end in cuts)
            found[stages] = PipelineTemplate(cuts=cuts, bottleneck=slowest)
    return found


def _even_cuts(job: PipelineJob, until: tuple[float, ...], stages: int) -> Cuts | None:
    """Return stages whose numbers of layers differ by one at most. Return None if layers take different times, or if a
    stage does not fit into a worker's memory."""
    cuts = stage_cuts(job.layers, stages)
    fits = not job.capacity or max(end - first for first, end in cuts) <= job.capacity
    even = all(abs(until[layer] - layer * until[1]) < 1e-9 for layer in range(len(until)))
    return tuple(cuts) if fits and even else None


def _best_cuts(layers: int, until: tuple[float, ...], stages: int, capacity: int) -> Cuts | None:
    """Return the layers of each stage such that the slowest stage is as fast as possible. The search halves the number
    of stages again and again."""

    @cache
    def best(first: int, end: int, count: int) -> tuple[float, Cuts] | None:
        if count == 1:
            fits = not capacity or end - first <= capacity
            return (until[end] - until[first], ((first, end),)) if fits else None
        left = count // 2
        found: tuple[float, Cuts] | None = None
        for cut in range(first + left, end - (count - left) + 1):
            one, other = best(first, cut, left), best(cut, end, count - left)
            if one and other and (found is None or max(one[0], other[0]) < found[0] - 1e-12):
                found = (max(one[0], other[0]), one[1] + other[1])
        return found

    cut = best(0, layers, stages)
    return cut[1] if cut else None


def choose_sizes(templates: dict[int, PipelineTemplate], members: int, wanted: int) -> tuple[int, ...]:
    """Solve a knapsack: return the pipelines' sizes that compute most per second with at most `members` workers.

    Among equally fast choices, prefer the choice with the most pipelines of the `wanted` size, then the choice with the
    fewest workers.
    """
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
    """Return how many microbatches each pipeline gets so that the last pipeline ends as early as possible."""
    shares = [0] * len(bottlenecks)
    queue = [(slow + fill, number) for number, (slow, fill) in enumerate(zip(bottlenecks, fills, strict=True))]
    heapify(queue)
    for _ in range(microbatches):
        done_at, number = queue[0]
        shares[number] += 1
        heapreplace(queue, (done_at + bottlenecks[number], number))
    return shares
