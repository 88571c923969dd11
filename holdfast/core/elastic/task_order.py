"""The order of passes and messages in a step: one list of each for all workers, of which each worker does its part.

In the list of passes each one comes after the passes that it needs, so any such list gives the same results. It follows
1F1B: a worker prefers backward passes. As a rule, it has no more unfinished microbatches than there are segments from
its own to the last.

If backward passes are made in two halves, the input half counts as the backward pass. A worker makes the weights half
when it has nothing else to do, or when it keeps as many graphs as the first worker of a route does.

Messages are in the order in which the passes that send them would end. A pass needs only messages from passes that end
before it starts, and those come before all that it sends. So if each worker posts its messages in this order, at
least the first one that is not complete can always be completed, even where a message waits for the one before it.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from holdfast.model.pipeline_routes import RouteSegment

_BACKWARD, _FORWARD, _WEIGHTS, _YIELDING = range(4)  # what a worker prefers; the last is a forward pass that waits


class PassLengths(NamedTuple):
    """How long passes through one layer take beside one another."""

    backward: float  # or its first half
    forward: float = 1.0
    weights: float = 0.0  # the second half


WHOLE, HALVES = PassLengths(backward=2.0), PassLengths(backward=1.0, weights=1.0)


class Task(NamedTuple):
    """One pass of a microbatch through one segment of its route."""

    microbatch: int
    depth: int  # of the segment in the route
    backward: bool
    weights: bool = False  # the second half of a backward pass


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


def order_tasks(routes: tuple[tuple[RouteSegment, ...], ...], *, halves: bool = False) -> list[Task]:
    """Return all passes of a step, ordered by the times at which they start. Each worker makes one pass at a time. With
    `halves` there are two tasks for each backward pass."""
    return [one.task for one in time_tasks(routes, halves=halves)]


def order_messages(routes: tuple[tuple[RouteSegment, ...], ...], *, halves: bool = False) -> list[Message]:
    """Return all messages of a step in the order in which their workers post them."""
    found: list[Message] = []
    timed = time_tasks(routes, halves=halves)
    for task, _ in sorted(timed, key=lambda one: one.ends):  # stable: equal ends keep their order
        route = routes[task.microbatch]
        other = task.depth - 1 if task.backward else task.depth + 1
        if task.weights or not 0 <= other < len(route) or route[other].worker == route[task.depth].worker:
            continue
        border = route[max(other, task.depth)].first
        found.append(Message(route[task.depth].worker, route[other].worker, task.microbatch, border, task.backward))
    return found


def time_tasks(
    routes: tuple[tuple[RouteSegment, ...], ...],
    *,
    halves: bool = False,
    lengths: PassLengths | None = None,
    work: Callable[[RouteSegment], float] = lambda segment: segment.end - segment.first,
) -> list[TimedTask]:
    """Return all passes of a step with the times at which they would end, ordered by when they start. `work` says how
    long a segment takes beside others."""
    lengths = lengths or (HALVES if halves else WHOLE)
    free: dict[int, float] = {}
    open_at: dict[tuple[int, int], int] = {}  # by worker and depth: microbatches forward, and not yet backward
    graphs: dict[tuple[int, int], int] = {}  # and those whose weights half is still to be made
    ready = [(0.0, _FORWARD, m, 0) for m, route in enumerate(routes) if route]  # when, what, microbatch, depth
    heapq.heapify(ready)
    order: list[TimedTask] = []
    while ready:
        at, kind, m, depth = heapq.heappop(ready)
        route = routes[m]
        segment, place = route[depth], (route[depth].worker, depth)
        if at < (begins := free.get(segment.worker, 0.0)):
            heapq.heappush(ready, (begins, _FORWARD if kind == _YIELDING else kind, m, depth))
            continue
        forward, full = kind in (_FORWARD, _YIELDING), halves and graphs.get(place, 0) >= len(route)
        if kind == _FORWARD and full:
            heapq.heappush(ready, (at, _YIELDING, m, depth))  # after the weights halves that can start now
            continue
        full = full or open_at.get(place, 0) >= len(route) - depth
        if forward and full and (later := _next_change(ready, at)) is not None:
            heapq.heappush(ready, (later, _FORWARD, m, depth))
            continue
        ends = at + work(segment) * lengths[_FORWARD if forward else kind]
        order.append(TimedTask(Task(m, depth, backward=not forward, weights=kind == _WEIGHTS), ends))
        free[segment.worker] = ends
        if kind == _WEIGHTS:
            graphs[place] -= 1
            continue
        open_at[place] = open_at.get(place, 0) + (1 if forward else -1)
        graphs[place] = graphs.get(place, 0) + int(forward)
        if halves and not forward:
            heapq.heappush(ready, (ends, _WEIGHTS, m, depth))
        for following, where in _follow(len(route), depth, backward=not forward):
            heapq.heappush(ready, (ends, following, m, where))
    return order


def _follow(length: int, depth: int, *, backward: bool) -> list[tuple[int, int]]:
    """Return what a pass of a route of this length makes possible, and at which depth."""
    if backward:
        return [(_BACKWARD, depth - 1)] if depth else []
    return [(_FORWARD, depth + 1) if depth + 1 < length else (_BACKWARD, depth)]


def _next_change(ready: list[tuple[float, int, int, int]], at: float) -> float | None:
    """Return the earliest time after `at` at which a pass in `ready` can start; None if there is none."""
    later = [one[0] for one in ready if one[0] > at]
    return min(later) if later else None
