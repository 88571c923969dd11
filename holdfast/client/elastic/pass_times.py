"""Measures how long this worker takes for the forward and backward pass of each of its layers, and for sending."""

import statistics
import time
from collections import deque
from collections.abc import Callable

import msgspec

_KEPT = 16  # steps; what is told is their median
_LEAST = 8  # steps before anything is told: the first ones are not typical


class LayerPassTimes(msgspec.Struct, frozen=True):
    """Seconds that a worker takes for one layer and one microbatch."""

    layer: int
    forward_s: float  # with recomputation: both times
    backward_s: float
    weights_s: float = 0.0  # of that, for the gradients of weights; 0 if passes are made whole


class PassTimes:
    """Adds up times in a step, and keeps those of the newest steps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._forward: dict[int, float] = {}  # by layer, in this step
        self._backward: dict[int, float] = {}
        self._weights: dict[int, float] = {}
        self._passes: dict[int, int] = {}  # backward ones: a step makes one for each microbatch
        self._sending_s, self._sent = 0.0, 0
        self._layers: dict[int, deque[tuple[float, float, float]]] = {}
        self._sends: deque[float] = deque(maxlen=_KEPT)
        self.steps = 0  # that were made by this plan

    def forget(self) -> None:
        """Drop everything, because the plan has changed."""
        self._layers.clear()
        self._sends.clear()
        self.steps = 0

    def begin_step(self) -> None:
        self._forward, self._backward, self._weights, self._passes = {}, {}, {}, {}
        self._sending_s, self._sent = 0.0, 0

    def add_forward(self, layer: int, since: float) -> None:
        self._forward[layer] = self._forward.get(layer, 0.0) + self.clock() - since

    def add_backward(self, layer: int, since: float) -> None:
        self._backward[layer] = self._backward.get(layer, 0.0) + self.clock() - since
        self._passes[layer] = self._passes.get(layer, 0) + 1

    def add_weights(self, layer: int, since: float) -> None:
        took_s = self.clock() - since
        self._backward[layer] = self._backward.get(layer, 0.0) + took_s
        self._weights[layer] = self._weights.get(layer, 0.0) + took_s

    def add_sends(self, took_s: float, sent: int) -> None:
        self._sending_s, self._sent = self._sending_s + took_s, self._sent + sent

    def end_step(self) -> None:
        self.steps += 1
        for layer, count in self._passes.items():
            kept = self._layers.setdefault(layer, deque(maxlen=_KEPT))
            forward_s, weights_s = self._forward.get(layer, 0.0), self._weights.get(layer, 0.0)
            kept.append((forward_s / count, self._backward[layer] / count, weights_s / count))
        if self._sent:
            self._sends.append(self._sending_s / self._sent)

    def list_layers(self) -> tuple[LayerPassTimes, ...]:
        """Return the median time of each layer that enough steps have timed."""
        return tuple(
            LayerPassTimes(layer, *(statistics.median(column) for column in zip(*kept, strict=True)))
            for layer, kept in sorted(self._layers.items())
            if len(kept) >= _LEAST
        )

    def median_send_s(self) -> float:
        """Return what this worker takes to hand over one tensor; 0 if that is not known."""
        return statistics.median(self._sends) if len(self._sends) >= _LEAST else 0.0
