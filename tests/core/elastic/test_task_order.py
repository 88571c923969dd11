"""The order of passes: every pass once, after those that it needs, and never further ahead than 1F1B goes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.elastic.task_order import Task, order_tasks, time_tasks
from holdfast.model.pipeline_routes import RouteSegment

Route = tuple[RouteSegment, ...]


@st.composite
def any_routes(draw: st.DrawFn) -> tuple[Route, ...]:
    """Routes of a few microbatches, each cut anywhere and computed by anybody."""
    layers, workers = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    routes = []
    for _ in range(draw(st.integers(1, 6))):
        cuts = sorted({0, layers, *draw(st.sets(st.integers(0, layers)))})
        who = draw(st.lists(st.integers(0, workers - 1), min_size=len(cuts), max_size=len(cuts)))
        routes.append(tuple(RouteSegment(w, a, b) for w, a, b in zip(who, cuts, cuts[1:], strict=False)))
    return tuple(routes)


@settings(deadline=None)
@given(any_routes(), st.booleans())
def test_every_pass_comes_once_and_after_those_that_it_needs(routes: tuple[Route, ...], halves: bool) -> None:
    order = order_tasks(routes, halves=halves)
    place = {task: at for at, task in enumerate(order)}
    kinds = [(False, False), (True, False), *([(True, True)] if halves else [])]
    wanted = {Task(m, d, *kind) for m, route in enumerate(routes) for d in range(len(route)) for kind in kinds}
    assert len(order) == len(place) and set(place) == wanted
    for task, at in place.items():
        before = task.depth + 1 if task.backward else task.depth - 1
        needed = [Task(task.microbatch, before, task.backward)] if 0 <= before < len(routes[task.microbatch]) else []
        needed += [Task(task.microbatch, task.depth, False)] if task.backward else []
        needed = [Task(task.microbatch, task.depth, True)] if task.weights else needed
        assert all(place[one] < at for one in needed)


@pytest.mark.parametrize("halves", [False, True])
def test_a_straight_pipeline_goes_one_forward_one_backward(*, halves: bool) -> None:
    route = tuple(RouteSegment(stage, stage, stage + 1) for stage in range(3))
    order = order_tasks((route,) * 8, halves=halves)
    for stage in range(3):
        ahead = most = graphs = kept = 0
        for task in order:
            if task.depth == stage:
                ahead += 0 if task.weights else -1 if task.backward else 1
                graphs += -1 if task.weights else 0 if task.backward else 1
            most, kept = max(most, ahead), max(kept, graphs)
        assert most == 3 - stage, "a stage keeps as many microbatches as the pipeline behind it is long"
        assert not halves or kept <= 3, "and with halves, as many as the first stage of any pipeline"


def lost_one(stage: int, *, stages: int = 4, each: int = 4) -> tuple[Route, ...]:
    """Routes of two pipelines, one of which has lost a stage: the other one's worker does its work too."""
    workers = [[stage if one == stage else stages * pipeline + one for one in range(stages)] for pipeline in (0, 1)]
    return tuple(tuple(RouteSegment(w, p, p + 1) for p, w in enumerate(mine)) for mine in workers for _ in range(each))


def span(routes: tuple[Route, ...], *, halves: bool) -> float:
    return max(one.ends for one in time_tasks(routes, halves=halves))


def test_halves_leave_as_little_idle_as_is_known_of_them() -> None:
    """A pass forward, an input half and a weights half take 1 each. 3 M + P - 1 for P stages and M microbatches is what
    the schedule ZB-H1 takes, and 3 (M + P - 1) is what 1F1B takes."""
    for stages, each in [(2, 4), (4, 4), (3, 6)]:
        straight = (tuple(RouteSegment(stage, stage, stage + 1) for stage in range(stages)),) * each
        assert span(straight, halves=False) == 3 * (each + stages - 1)
        assert span(straight, halves=True) <= 3 * each + stages
    for stage in range(4):
        busy = 3 * 8
        assert span(lost_one(stage), halves=True) <= busy + 5 < span(lost_one(stage), halves=False)


def test_microbatches_that_are_left_out_have_no_passes() -> None:
    assert order_tasks(((), (RouteSegment(0, 0, 1),))) == [Task(1, 0, False), Task(1, 0, True)]
