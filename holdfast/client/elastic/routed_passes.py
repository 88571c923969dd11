"""Makes one worker's part of a step's forward and backward passes along the routes of a plan.

Each layer has an autograd graph of its own, with contiguous tensors at its borders. Its random numbers depend only on
the step, the microbatch and the layer. So the bits of its results depend neither on the worker nor on its neighbours.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from holdfast.client.elastic.backward_halves import BackwardHalves, Island, LeftOver, go_whole
from holdfast.client.elastic.finished_passes import FinishedPasses
from holdfast.client.elastic.layer_state import LayerUnit, draw_seed
from holdfast.client.elastic.pass_messages import PassMessages
from holdfast.client.elastic.pass_times import PassTimes
from holdfast.core.elastic.task_order import Task
from holdfast.model.pipeline_routes import RoutePlan, RouteSegment

BatchOf = Callable[[int, int], tuple[torch.Tensor, Any]]  # step and microbatch -> input, and what the loss takes
LossOf = Callable[[torch.Tensor, Any], torch.Tensor]


class PassSettings(NamedTuple):
    """The settings that all steps of a job share."""

    loss: LossOf
    microbatches: int
    layers: int
    seed: int
    recompute: bool


class RoutedPasses:
    """The passes that one worker makes in one step."""

    def __init__(
        self,
        settings: PassSettings,
        units: Mapping[int, LayerUnit],
        messages: PassMessages,
        times: PassTimes,
        made: FinishedPasses,
        *,
        halves: BackwardHalves | None = None,
    ) -> None:
        """With `halves`, backward passes are made in two halves, as the tasks must say too."""
        self._settings, self._units, self._messages, self._device = settings, units, messages, messages.device
        self._times, self._made, self._halves = times, made, halves
        self._open: dict[tuple[int, int], list[Island]] = {}  # by microbatch and depth
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}  # with recomputation
        self._left: dict[tuple[int, int], list[tuple[int, LeftOver]]] = {}  # weights halves, by layer

    def run(self, plan: RoutePlan, tasks: list[Task], worker: int, step: int, batch: BatchOf) -> None:
        self._times.begin_step()
        for task in tasks:
            route = plan.routes[task.microbatch]
            if route[task.depth].worker != worker:
                continue
            if task.weights:
                self._make_weights_halves(task.microbatch, task.depth)
            elif task.backward:
                self._go_backward(route, task, step, batch)
            else:
                self._go_forward(route, task, step, batch)
        self._times.add_sends(self._messages.sending_s, self._messages.sent)

    def _go_forward(self, route: tuple[RouteSegment, ...], task: Task, step: int, batch: BatchOf) -> None:
        m, depth = task.microbatch, task.depth
        segment = route[depth]
        if depth:
            given = self._messages.fetch(route[depth - 1].worker, (m, segment.first, False))
        else:
            given = batch(step, m)[0].to(self._device)
        if self._settings.recompute and depth + 1 < len(route):  # the last segment goes backward at once
            self._inputs[m, depth] = given
            with torch.no_grad():
                made = given
                for layer in range(segment.first, segment.end):
                    made = self._call_layer(layer, made, step, m)
        else:
            islands = self._build_islands(segment, given, step, m)
            self._open[m, depth] = islands
            made = islands[-1].made.detach()
        if depth + 1 < len(route):
            self._messages.hand_over(made, route[depth + 1].worker, (m, segment.end, False))

    def _go_backward(self, route: tuple[RouteSegment, ...], task: Task, step: int, batch: BatchOf) -> None:
        m, depth = task.microbatch, task.depth
        segment = route[depth]
        if (m, depth) in self._inputs:
            islands = self._build_islands(segment, self._inputs.pop((m, depth)), step, m)
        else:
            islands = self._open.pop((m, depth))
        if depth + 1 < len(route):
            gradient = self._messages.fetch(route[depth + 1].worker, (m, segment.end, True))
        else:
            gradient = self._start_backward(islands[-1].made, step, m, batch)
        left: list[tuple[int, LeftOver]] = []
        while islands:
            island, since = islands.pop(), self._times.clock()
            came = self._go_through(island, gradient, m, left)
            gradient = torch.zeros_like(island.given) if came is None else came.contiguous()
            self._times.add_backward(island.layer, since)
        self._left[m, depth] = left
        if depth:
            self._messages.hand_over(gradient, route[depth - 1].worker, (m, segment.first, True))

    def _go_through(
        self, island: Island, gradient: torch.Tensor, m: int, left: list[tuple[int, LeftOver]]
    ) -> torch.Tensor | None:
        """Take one layer's backward pass, or its first half. Return the gradient of the layer's input."""
        unit = self._units[island.layer]
        if self._halves is None:
            came = go_whole(island, gradient)
        else:
            came, rest = self._halves.go_back(unit, island, gradient)
            if rest is not None:
                left.append((island.layer, rest))
                return came
        if unit.parameters:
            self._made.gradients[island.layer, m] = unit.take_gradients()
        self._made.finish(island.layer, m)
        return came

    def _make_weights_halves(self, m: int, depth: int) -> None:
        left = self._left.pop((m, depth))
        while left:
            (layer, rest), since = left.pop(0), self._times.clock()
            self._made.gradients[layer, m] = rest()
            self._made.finish(layer, m)
            del rest
            self._times.add_weights(layer, since)

    def _start_backward(self, output: torch.Tensor, step: int, m: int, batch: BatchOf) -> torch.Tensor:
        """Compute and keep the loss of a microbatch; return the gradient of the last layer's output."""
        leaf = output.detach().requires_grad_()
        torch.manual_seed(draw_seed(self._settings.seed, step, m, self._settings.layers))
        target = batch(step, m)[1]
        loss = self._settings.loss(leaf, target.to(self._device) if isinstance(target, torch.Tensor) else target)
        self._made.losses[m] = loss.detach().double()
        (loss / self._settings.microbatches).backward()
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()

    def _build_islands(self, segment: RouteSegment, given: torch.Tensor, step: int, m: int) -> list[Island]:
        islands = []
        for layer in range(segment.first, segment.end):
            given = given.detach()
            if given.is_floating_point():
                given.requires_grad_(layer > 0)  # nobody asks for the gradient of the samples
            made = self._call_layer(layer, given, step, m)
            islands.append(Island(layer, given, made))
            given = made
        return islands

    def _call_layer(self, layer: int, given: torch.Tensor, step: int, m: int) -> torch.Tensor:
        since = self._times.clock()
        torch.manual_seed(draw_seed(self._settings.seed, step, m, layer))
        made = self._units[layer].module(given)
        if not isinstance(made, torch.Tensor):
            raise TypeError(f"layer {layer} returned {type(made).__name__}, and must return one tensor")
        made = made.contiguous()
        self._times.add_forward(layer, since)
        return made
