"""The order of passes: every pass once, after those that it needs, and never further ahead than 1F1B goes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client.elastic.task_order import Task, order_tasks
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
@given(any_routes())
def test_every_pass_comes_once_and_after_those_that_it_needs(routes: tuple[Route, ...]) -> None:
    order = order_tasks(routes)
    place = {task: at for at, task in enumerate(order)}
    wanted = {Task(m, d, b) for m, route in enumerate(routes) for d in range(len(route)) for b in (False, True)}
    assert len(order) == len(place) and set(place) == wanted
    for task, at in place.items():
        before = task.depth + 1 if task.backward else task.depth - 1
        needed = [Task(task.microbatch, before, task.backward)] if 0 <= before < len(routes[task.microbatch]) else []
        needed += [Task(task.microbatch, task.depth, False)] if task.backward else []
        assert all(place[one] < at for one in needed)


def test_a_straight_pipeline_goes_one_forward_one_backward() -> None:
    route = tuple(RouteSegment(stage, stage, stage + 1) for stage in range(3))
    order = order_tasks((route,) * 8)
    for stage in range(3):
        ahead = most = 0
        for task in order:
            ahead += (task.depth == stage) * (-1 if task.backward else 1)
            most = max(most, ahead)
        assert most == 3 - stage, "a stage keeps as many microbatches as the pipeline behind it is long"


def test_microbatches_that_are_left_out_have_no_passes() -> None:
    assert order_tasks(((), (RouteSegment(0, 0, 1),))) == [Task(1, 0, False), Task(1, 0, True)]
