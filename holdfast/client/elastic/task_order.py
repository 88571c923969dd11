"""The order of forward and backward passes in a step: one list for all workers, of which each worker does its part.

In this list each pass comes after the passes that it needs. Any list with this property gives the same results and
cannot block. The order follows 1F1B: a worker prefers backward passes. As a rule, it has no more unfinished
microbatches than there are segments from its own to the last.
"""

import heapq
from typing import NamedTuple

from holdfast.model.pipeline_routes import RouteSegment

_BACKWARD = 2.0  # as long as a forward pass


class Task(NamedTuple):
    """One pass of a microbatch through one segment of its route."""

    microbatch: int
    depth: int  # of the segment in the route
    backward: bool


def order_tasks(routes: tuple[tuple[RouteSegment, ...], ...]) -> list[Task]:
    """Return all passes of a step, ordered by the times at which they start. Each worker makes one pass at a time."""
    free: dict[int, float] = {}
    open_at: dict[tuple[int, int], int] = {}  # by worker and depth: microbatches forward, and not yet backward
    ready = [(0.0, 1, m, 0) for m, route in enumerate(routes) if route]  # ready at, forward, microbatch, depth
    heapq.heapify(ready)
    order: list[Task] = []
    while ready:
        at, forward, m, depth = heapq.heappop(ready)
        route = routes[m]
        segment, worker = route[depth], route[depth].worker
        if at < (begins := free.get(worker, 0.0)):
            heapq.heappush(ready, (begins, forward, m, depth))
            continue
        room = len(route) - depth
        if forward and open_at.get((worker, depth), 0) >= room and (later := _next_change(ready, at)) is not None:
            heapq.heappush(ready, (later, forward, m, depth))
            continue
        order.append(Task(m, depth, backward=not forward))
        ends = at + (segment.end - segment.first) * (1.0 if forward else _BACKWARD)
        free[worker] = ends
        open_at[worker, depth] = open_at.get((worker, depth), 0) + (1 if forward else -1)
        if forward and depth + 1 < len(route):
            heapq.heappush(ready, (ends, 1, m, depth + 1))
        elif forward:
            heapq.heappush(ready, (ends, 0, m, depth))
        elif depth:
            heapq.heappush(ready, (ends, 0, m, depth - 1))
    return order


def _next_change(ready: list[tuple[float, int, int, int]], at: float) -> float | None:
    """Return the earliest time after `at` at which a pass in `ready` can start; None if there is none."""
    later = [one[0] for one in ready if one[0] > at]
    return min(later) if later else None
