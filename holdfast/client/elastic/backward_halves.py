"""Splits a layer's backward pass into halves: the gradient of its input, and later the gradients of its weights.

The input half runs the graph from the layer's output to its input and keeps what arrives at the junctions: the nodes at
which weights enter. The weights half runs the graph from there to the weights. So no part runs twice, and sums have the
same order as in a whole pass. The first time that a layer is split, its pass is also made whole, and both must have the
same bits. If not, or if its graph cannot be split, the layer's passes stay whole.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from holdfast.client.elastic.layer_state import LayerUnit, flatten_gradients

Gradients = Sequence[torch.Tensor | None]
LeftOver = Callable[[], torch.Tensor]  # the weights half that is still to be made; returns the flat gradient

_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)  # of operations that run a second time


class CannotSplitError(Exception):
    """Raised with the reason why a layer's backward pass stays whole."""


class Island(NamedTuple):
    """The autograd graph of one layer for one microbatch, by its input and its output."""

    layer: int
    given: torch.Tensor
    made: torch.Tensor


class Junction(NamedTuple):
    """A node on the way from a layer's output to its input at which weights enter."""

    node: Node
    weights: tuple[int, ...]  # places of these weights among the layer's parameters


class GraphShape(NamedTuple):
    """What a layer's graph looks like: where its weights enter, and what all graphs with the same operations share."""

    junctions: tuple[Junction, ...]
    names: tuple[str, ...]


class HalfPass(NamedTuple):
    """The result of an input half."""

    came: torch.Tensor | None  # the gradient of the layer's input
    rest: LeftOver | None  # None if the pass was made whole, and the gradients of weights are in their parameters


class BackwardHalves:
    """Makes backward passes of one worker's layers in halves. Remembers which layers stay whole, and why."""

    def __init__(self) -> None:
        self.refused: dict[int, str] = {}  # by layer
        self._untold: list[int] = []
        self._proved: set[tuple[object, ...]] = set()  # layers, with the inputs and graphs for which halves are exact

    def go_back(self, unit: LayerUnit, island: Island, gradient: torch.Tensor) -> HalfPass:
        """Return the gradient of the layer's input, and how to make the rest of its backward pass."""
        if not island.made.requires_grad or not unit.parameters or unit.number in self.refused:
            return HalfPass(go_whole(island, gradient), None)
        if not island.given.requires_grad:  # nobody waits for a gradient, so all of it may come later
            return HalfPass(None, lambda: _make_later(unit, island, gradient))
        try:
            shape = find_junctions(island.made, island.given, unit.parameters)
            key = (unit.number, island.given.shape, island.given.dtype, shape.names)
            if key not in self._proved:
                return self._prove(unit, island, gradient, shape, key)
            return _go_half(unit, island, gradient, shape.junctions)
        except CannotSplitError as e:
            self._refuse(unit.number, str(e))
            return HalfPass(go_whole(island, gradient), None)

    def describe_refused(self, of: Collection[int]) -> list[str]:
        """Return a line for each reason why layers stay whole, about those of these layers that are not told yet."""
        told: dict[str, list[int]] = {}
        for layer in self._untold:
            if layer in of:
                told.setdefault(self.refused[layer], []).append(layer)
        self._untold.clear()
        return [
            f"backward passes of layers {', '.join(map(str, sorted(layers)))} stay whole, not in halves: {reason}"
            for reason, layers in told.items()
        ]

    def _refuse(self, layer: int, reason: str) -> None:
        self.refused[layer] = reason
        self._untold.append(layer)

    def _prove(
        self, unit: LayerUnit, island: Island, gradient: torch.Tensor, shape: GraphShape, key: tuple[object, ...]
    ) -> HalfPass:
        """Make the pass whole, and in halves as well. If any bit differs, this layer's passes stay whole."""
        came = go_whole(island, gradient, keep=True)
        whole = unit.take_gradients()
        try:
            half = _go_half(unit, island, gradient, shape.junctions)
            same = half.rest is not None and same_bits(half.came, came) and same_bits(half.rest(), whole)
            reason = "" if same else "its halves do not have the bits of a whole pass"
        except _FAILURES as e:
            reason = f"its halves fail: {str(e).partition(chr(10))[0][:100]}"
        if reason:
            self._refuse(unit.number, reason)
        else:
            self._proved.add(key)
        for parameter in unit.parameters:
            parameter.grad = None
        return HalfPass(came, lambda: whole)


def find_junctions(made: torch.Tensor, given: torch.Tensor, weights: Sequence[torch.Tensor]) -> GraphShape:
    """Return where weights enter the graph between a layer's input and its output. Raises CannotSplitError."""
    root = made.grad_fn
    if root is None:
        raise CannotSplitError("it returns its input")
    if any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in weights):
        raise CannotSplitError("its weights have hooks")
    places = {get_gradient_edge(weight).node: place for place, weight in enumerate(weights)}
    order = _list_nodes(root)
    end = get_gradient_edge(given).node
    on_way: set[Node] = set()
    for node in order:
        if node is end or any(after in on_way for after, _ in node.next_functions):
            on_way.add(node)
    if root not in on_way:
        raise CannotSplitError("its output does not depend on its input")
    if not places.keys() <= set(order):
        raise CannotSplitError("its graph does not show all of its weights")
    owners: dict[Node, Node] = {}
    junctions = []
    for node in order:
        if node in on_way and (behind := _list_behind(node, on_way)):
            if issubclass(type(node), BackwardCFunction):
                raise CannotSplitError(f"weights enter {node.name()}, which is written in Python")
            if any(owners.setdefault(one, node) is not node for one in behind):
                raise CannotSplitError("it uses a weight in several places")
            found = tuple(places[one] for one in behind if one in places)
            junctions += [Junction(node, found)] if found else []
    return GraphShape(tuple(junctions), tuple(node.name() for node in order))


def _list_nodes(root: Node) -> list[Node]:
    """Return all nodes of a graph, each one after those that its gradients go to."""
    order: list[Node] = []
    seen: set[Node] = {root}
    stack = [(root, iter(root.next_functions))]
    while stack:
        node, rest = stack[-1]
        after = next((one for one, _ in rest if one is not None and one not in seen), None)
        if after is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(after)
            stack.append((after, iter(after.next_functions)))
    return order


def _list_behind(node: Node, on_way: set[Node]) -> list[Node]:
    """Return the nodes that get gradients from this one without those on the way to the layer's input."""
    found: list[Node] = []
    stack = [node]
    while stack:
        for after, _ in stack.pop().next_functions:
            if after is not None and after not in on_way and after not in found:
                found.append(after)
                stack.append(after)
    return found


def go_whole(island: Island, gradient: torch.Tensor, *, keep: bool = False) -> torch.Tensor | None:
    if island.made.requires_grad:
        torch.autograd.backward(island.made, gradient, retain_graph=keep)
    came, island.given.grad = island.given.grad, None
    return came


def _make_later(unit: LayerUnit, island: Island, gradient: torch.Tensor) -> torch.Tensor:
    torch.autograd.backward(island.made, gradient)
    return unit.take_gradients()


def _go_half(unit: LayerUnit, island: Island, gradient: torch.Tensor, junctions: Sequence[Junction]) -> HalfPass:
    arrived: list[Gradients] = [()] * len(junctions)

    def note(place: int) -> Callable[[Gradients], None]:
        return lambda gradients: arrived.__setitem__(place, gradients)

    hooks = [junction.node.register_prehook(note(place)) for place, junction in enumerate(junctions)]
    try:
        [came] = torch.autograd.grad(island.made, [island.given], gradient, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return HalfPass(came, lambda: _finish(unit, junctions, arrived))


def _finish(unit: LayerUnit, junctions: Sequence[Junction], arrived: Sequence[Gradients]) -> torch.Tensor:
    """Make the weights half: from what arrived at the junctions to the weights."""
    found: list[torch.Tensor | None] = [None] * len(unit.parameters)
    for junction, gradients in zip(junctions, arrived, strict=True):
        there = [(GradientEdge(junction.node, output), one) for output, one in enumerate(gradients) if one is not None]
        if not there:
            continue
        edges, values = zip(*there, strict=True)
        wanted = [unit.parameters[place] for place in junction.weights]
        came = torch.autograd.grad(edges, wanted, values, allow_unused=True)
        for place, one in zip(junction.weights, came, strict=True):
            found[place] = one
    return flatten_gradients(unit.parameters, found)


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same bits, also where they are no numbers."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    pair = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*pair)
