"""Workers whose messages end one after the other, as over NCCL: none waits for ever, and the bits are those of one."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.client.elastic.backward_halves import BackwardHalves
from holdfast.client.elastic.finished_passes import FinishedPasses
from holdfast.client.elastic.gradient_sums import GradientSums
from holdfast.client.elastic.layer_state import HOST, LayerUnit
from holdfast.client.elastic.packed_layer_transfer import receive_packed, send_packed, swap_packed
from holdfast.client.elastic.pass_messages import PassMessages
from holdfast.client.elastic.pass_times import PassTimes
from holdfast.client.elastic.rank_traffic import RankTraffic
from holdfast.client.elastic.routed_passes import PassSettings, RoutedPasses
from holdfast.core.elastic.task_order import Message, order_messages, order_tasks
from holdfast.model.pipeline_routes import RoutePlan, RouteSegment
from tests.client.elastic.strict_streams import DeadlockError, StrictStreams

Route = tuple[RouteSegment, ...]
OrderMessages = Callable[[tuple[Route, ...]], list[Message]]
WIDTH = 3


@st.composite
def any_plan(draw: st.DrawFn) -> RoutePlan:
    """Routes of a few microbatches, each cut anywhere and computed by anybody; all hold what they compute."""
    layers, workers = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    routes = []
    for _ in range(draw(st.integers(1, 6))):
        cuts = sorted({0, layers, *draw(st.sets(st.integers(0, layers)))})
        who = draw(st.lists(st.integers(0, workers - 1), min_size=len(cuts), max_size=len(cuts)))
        routes.append(tuple(RouteSegment(w, a, b) for w, a, b in zip(who, cuts, cuts[1:], strict=False)))
    held: list[set[int]] = [set() for _ in range(workers)]
    for segment in (one for route in routes for one in route):
        held[segment.worker].update(range(segment.first, segment.end))
    return RoutePlan(held=tuple(tuple(sorted(one)) for one in held), routes=tuple(routes))


def batch(step: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2 + m, WIDTH, generator=torch.Generator().manual_seed(100 * step + m))
    return x, x.flip(1)


def make_units(layers: tuple[int, ...]) -> dict[int, LayerUnit]:
    make = functools.partial(nn.Linear, WIDTH, WIDTH)
    return {n: LayerUnit(n, make, functools.partial(torch.optim.SGD, lr=0.1), 7) for n in layers}


def make_step(
    plan: RoutePlan, order: OrderMessages = order_messages, *, halves: bool = False
) -> dict[int, list[torch.Tensor]]:
    """Make the passes and sums of a step over strict streams; return each layer's gradient on all who hold it."""
    layers = plan.routes[0][-1].end
    held = [make_units(layers) for layers in plan.held]
    streams, tasks, messages = StrictStreams(len(held)), order_tasks(plan.routes, halves=halves), order(plan.routes)
    passes = PassSettings(nn.functional.mse_loss, len(plan.routes), layers, seed=7, recompute=False)

    def work(worker: int) -> None:
        traffic = RankTraffic(HOST, functools.partial(streams.post, worker))
        made = FinishedPasses(1)
        split, sent = BackwardHalves() if halves else None, PassMessages(messages, worker, traffic)
        mine = RoutedPasses(passes, held[worker], sent, PassTimes(), made, halves=split)
        mine.run(plan, tasks, worker, 1, batch)
        GradientSums(plan, worker, "ordered", layers).sum_gradients(held[worker], made.gradients, traffic)

    streams.run(work)
    found: dict[int, list[torch.Tensor]] = {}
    for layer, unit in (one for units in held for one in units.items()):
        assert unit.gradient is not None
        found.setdefault(layer, []).append(unit.gradient)
    return found


def alone(plan: RoutePlan) -> RoutePlan:
    layers = plan.routes[0][-1].end
    return RoutePlan(held=(tuple(range(layers)),), routes=((RouteSegment(0, 0, layers),),) * len(plan.routes))


@settings(deadline=None, max_examples=25)
@given(any_plan(), st.booleans())
def test_no_routes_make_workers_wait_for_ever_or_change_a_bit(plan: RoutePlan, halves: bool) -> None:
    wanted, order = make_step(alone(plan)), functools.partial(order_messages, halves=halves)
    for layer, gradients in make_step(plan, order, halves=halves).items():
        assert all(torch.equal(one, wanted[layer][0]) for one in gradients)


def test_another_order_makes_workers_wait_for_ever() -> None:
    """The model is strict enough: two stages that first send what they have, and then receive, stand still."""
    plan = RoutePlan(held=((0,), (1,)), routes=((RouteSegment(0, 0, 1), RouteSegment(1, 1, 2)),) * 4)
    assert set(make_step(plan)) == {0, 1}

    def forward_last(routes: tuple[Route, ...]) -> list[Message]:
        return sorted(order_messages(routes), key=lambda one: not one.backward)

    with pytest.raises((DeadlockError, KeyError)):
        make_step(plan, forward_last)


def test_messages_are_those_between_workers() -> None:
    route = (RouteSegment(0, 0, 2), RouteSegment(1, 2, 3), RouteSegment(1, 3, 4), RouteSegment(0, 4, 5))
    assert order_messages((route,)) == [
        Message(0, 1, 0, 2, backward=False),
        Message(1, 0, 0, 4, backward=False),
        Message(0, 1, 0, 4, backward=True),
        Message(1, 0, 0, 2, backward=True),
    ]


@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 0, 1), (0, 2, 0)])
def test_snapshots_go_round_a_ring(counts: tuple[int, ...]) -> None:
    """Each worker sends its own to the next; how many there are differs."""
    streams, world = StrictStreams(len(counts)), len(counts)
    packed = [
        [torch.full((8 * (n + 1),), 16 * w + n, dtype=torch.uint8) for n in range(c)] for w, c in enumerate(counts)
    ]
    came: dict[int, list[Any]] = {}

    def work(worker: int) -> None:
        traffic = RankTraffic(HOST, functools.partial(streams.post, worker))
        came[worker] = swap_packed(packed[worker], (worker + 1) % world, (worker - 1) % world, 4, traffic)

    streams.run(work)
    for worker in range(world):
        sent = packed[(worker - 1) % world]
        assert [one.tolist() for one in came[worker]] == [one.tolist() for one in sent]


def test_layers_move_in_a_circle() -> None:
    streams = StrictStreams(3)
    moves = [(0, 1), (1, 2), (2, 0), (0, 2), (2, 1)]
    came: list[tuple[int, int, int]] = []

    def work(worker: int) -> None:
        traffic = RankTraffic(HOST, functools.partial(streams.post, worker))
        for source, target in moves:
            if worker == source:
                send_packed(torch.full((16,), source, dtype=torch.uint8), target, traffic)
            elif worker == target:
                came.append((source, target, int(receive_packed(source, traffic)[0])))
        traffic.settle()

    streams.run(work)
    assert sorted(came) == sorted((source, target, source) for source, target in moves)
