"""Pipeline templates: the best cut of the layers for each number of stages, and how many pipelines of each size."""

from collections.abc import Sequence
from functools import cache
from heapq import heapify, heapreplace
from operator import itemgetter

import msgspec

from holdfast.core.elastic.first_plan import stage_cuts
from holdfast.model.pipeline_routes import PipelineJob

Cuts = tuple[tuple[int, int], ...]


class PipelineTemplate(msgspec.Struct, frozen=True):
    """A pipeline template: the layers of each stage, and the time of the slowest stage."""

    cuts: Cuts
    bottleneck: float


def make_templates(
    job: PipelineJob, until: tuple[float, ...], most: int, send: float = 0.0
) -> dict[int, PipelineTemplate]:
    """Return the template of each size up to `most` whose stages fit into memory. `send` is how long a worker sends
    one microbatch to the next."""
    found = {}
    for stages in range(1, min(most, job.layers) + 1):
        cuts = _even_cuts(job, until, stages) or _best_cuts(job.layers, until, stages, job.capacity)
        if cuts is not None:
            slowest = max(until[end] - until[first] for first, end in cuts)
            found[stages] = PipelineTemplate(cuts=cuts, bottleneck=slowest + (send if stages > 1 else 0.0))
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


def choose_sizes(templates: dict[int, PipelineTemplate], rooms: Sequence[int], wanted: int) -> list[tuple[int, ...]]:
    """Solve a knapsack for each of `rooms`: return the pipelines' sizes that compute most per second with at most so
    many workers.

    Among equally fast choices, prefer the choice with the most pipelines of the `wanted` size, then the choice with the
    fewest workers.
    """
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # by room: rate, pipelines as wanted, workers as negative number
    last = [0]  # by room: the size that was taken last; 0: it is as with one worker less
    for count in range(1, max(rooms, default=0) + 1):
        options = [(best[count - 1], 0)]
        for size, template in templates.items():
            if size <= count:
                rate, alike, fewer = best[count - size]
                options.append(
                    ((round(rate + 1 / template.bottleneck, 9), alike + (size == wanted), fewer - size), size)
                )
        most, size = max(options, key=itemgetter(0))
        best.append(most)
        last.append(size)
    return [_sizes_in(last, room) for room in rooms]


def _sizes_in(last: Sequence[int], room: int) -> tuple[int, ...]:
    sizes = []
    while room > 0:
        sizes += [last[room]] if last[room] else []
        room -= last[room] or 1
    return tuple(sorted(sizes, reverse=True))


def share_microbatches(bottlenecks: list[float], fills: list[float], microbatches: int) -> list[int]:
    """Return how many microbatches each pipeline gets so that the last pipeline ends as early as possible. Pipelines
    that are alike get their microbatches together."""
    shares = [0] * len(bottlenecks)
    alike: dict[tuple[float, float], list[int]] = {}
    for number, (slow, fill) in enumerate(zip(bottlenecks, fills, strict=True)):
        alike.setdefault((slow, fill), []).append(number)
    queue = [(slow + fill, numbers[0], slow, numbers) for (slow, fill), numbers in alike.items()]
    heapify(queue)
    while microbatches > 0:
        done_at = queue[0][0]
        turn: list[int] = []  # all that would be done at this instant
        while queue[0][0] == done_at:
            _, first, slow, numbers = queue[0]
            turn += numbers
            heapreplace(queue, (done_at + slow, first, slow, numbers))
        for number in sorted(turn)[:microbatches]:
            shares[number] += 1
        microbatches -= len(turn)
    return shares
