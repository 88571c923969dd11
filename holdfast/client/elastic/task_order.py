"""The order of passes and messages in a step: one list of each for all workers, of which each worker does its part.

In the list of passes each one comes after the passes that it needs, so any such list gives the same results. It follows
1F1B: a worker prefers backward passes. As a rule, it has no more unfinished microbatches than there are segments from
its own to the last.

Messages are in the order in which the passes that send them would end. A pass needs only messages from passes that end
before it starts, and those come before all that it sends. So if each worker posts its messages in this order, at
least the first one that is not complete can always be completed, even where a message waits for the one before it.
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


class Message(NamedTuple):
    """A tensor that one worker sends to another: an activation, or with `backward` its gradient."""

    source: int
    target: int
    microbatch: int
    border: int  # the first layer behind the place where the route changes its worker
    backward: bool


class TimedTask(NamedTuple):
    """A pass, and when it would end if all layers took equally long and messages took no time."""

    task: Task
    ends: float


def order_tasks(routes: tuple[tuple[RouteSegment, ...], ...]) -> list[Task]:
    """Return all passes of a step, ordered by the times at which they start. Each worker makes one pass at a time."""
    return [one.task for one in _time_tasks(routes)]


def order_messages(routes: tuple[tuple[RouteSegment, ...], ...]) -> list[Message]:
    """Return all messages of a step in the order in which their workers post them."""
    found: list[Message] = []
    for task, _ in sorted(_time_tasks(routes), key=lambda one: one.ends):  # stable: equal ends keep their order
        route = routes[task.microbatch]
        other = task.depth - 1 if task.backward else task.depth + 1
        if 0 <= other < len(route) and route[other].worker != route[task.depth].worker:
            border = route[max(other, task.depth)].first
            found.append(Message(route[task.depth].worker, route[other].worker, task.microbatch, border, task.backward))
    return found


def _time_tasks(routes: tuple[tuple[RouteSegment, ...], ...]) -> list[TimedTask]:
    free: dict[int, float] = {}
    open_at: dict[tuple[int, int], int] = {}  # by worker and depth: microbatches forward, and not yet backward
    ready = [(0.0, 1, m, 0) for m, route in enumerate(routes) if route]  # ready at, forward, microbatch, depth
    heapq.heapify(ready)
    order: list[TimedTask] = []
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
        ends = at + (segment.end - segment.first) * (1.0 if forward else _BACKWARD)
        order.append(TimedTask(Task(m, depth, backward=not forward), ends))
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
