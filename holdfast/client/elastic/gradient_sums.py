"""Sums the gradients of a step over its microbatches. The sums are equal in every bit on all workers that hold a layer.

A layer's flat gradient is cut into as many pieces as workers hold the layer; each of these holders sums one piece.
Every worker that computed the layer sends each piece to its holder, and the holder sends the sum to the other holders.
With the reduction "ordered", a holder sums by microbatch number, so all routes give the same bits. With "float", each
worker first adds up its own microbatches; the holder sums these in the order of each worker's first microbatch.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import torch

from holdfast.client.elastic.layer_state import LayerUnit
from holdfast.client.elastic.rank_traffic import Outgoing, RankTraffic
from holdfast.model.pipeline_routes import RoutePlan

Reduction = Literal["ordered", "float"]
Rows = dict[int, list[int]]  # by worker: the microbatches of which it has a layer's gradient
Sends = list[Outgoing]
Receives = dict[tuple[int, int], torch.Tensor]  # by layer and source


def find_rows(plan: RoutePlan, layer: int) -> Rows:
    rows: Rows = {}
    for m, route in enumerate(plan.routes):
        for segment in route:
            if segment.first <= layer < segment.end:
                rows.setdefault(segment.worker, []).append(m)
    return rows


class GradientSums:
    """Sums the gradients of the layers that one worker holds under a plan."""

    def __init__(self, plan: RoutePlan, worker: int, reduction: Reduction, layers: int) -> None:
        self._worker, self._reduction = worker, reduction
        self._rows = [find_rows(plan, layer) for layer in range(layers)]
        self._holders = [[w for w, held in enumerate(plan.held) if layer in held] for layer in range(layers)]

    def sum_gradients(
        self,
        units: Mapping[int, LayerUnit],
        gradients: dict[tuple[int, int], torch.Tensor],
        traffic: RankTraffic,
    ) -> None:
        """Give each unit the sum of its gradients over all microbatches. With "ordered", the gradients of microbatches
        stay, in the same memory as what is sent of them; with "float" they are removed."""
        mine = [layer for layer in sorted(units) if units[layer].parameters]
        own = {layer: self._stack(gradients, layer) for layer in mine}
        if self._reduction == "float":
            gradients.clear()
        sends: Sends = []
        came: Receives = {}
        for layer in mine:
            self._exchange_rows(units[layer], own[layer], sends, came, traffic.device)
        _swap(sends, came, traffic)
        for layer in mine:
            units[layer].gradient = self._sum_piece(layer, own[layer], came)
        sends, came = [], {}
        for layer in mine:
            self._exchange_pieces(units[layer], sends, came, traffic.device)
        _swap(sends, came, traffic)
        for layer in mine:
            units[layer].gradient = self._join_pieces(units[layer], came)
        traffic.settle()

    def _stack(self, gradients: dict[tuple[int, int], torch.Tensor], layer: int) -> torch.Tensor | None:
        numbers = self._rows[layer].get(self._worker, [])
        if not numbers:
            return None
        if self._reduction == "ordered":
            stacked = torch.stack([gradients[layer, m] for m in numbers])
            gradients.update({(layer, m): row for m, row in zip(numbers, stacked, strict=True)})
            return stacked
        total = gradients[layer, numbers[0]].clone()
        for m in numbers[1:]:
            total += gradients[layer, m]
        return total[None]

    def _count_rows(self, layer: int, worker: int) -> int:
        count = len(self._rows[layer].get(worker, []))
        return count if self._reduction == "ordered" else min(count, 1)

    def _cut(self, layer: int, size: int) -> list[tuple[int, int]]:
        """Return (start, end) of the piece that each worker with this layer sums, in a flat gradient of this size."""
        count = len(self._holders[layer])
        edges = [size * one // count for one in range(count + 1)]
        return list(pairwise(edges))

    def _exchange_rows(
        self,
        unit: LayerUnit,
        own: torch.Tensor | None,
        sends: Sends,
        receives: Receives,
        device: torch.device,
    ) -> None:
        """Note what this worker sends of its microbatches' gradients, and what it gets of the piece that it sums."""
        layer, size = unit.number, unit.gradient_size
        holders, cuts = self._holders[layer], self._cut(layer, size)
        for holder, (first, end) in zip(holders, cuts, strict=True):
            if holder != self._worker and own is not None and end > first:
                sends.append((own[:, first:end].contiguous(), holder))
        first, end = cuts[holders.index(self._worker)]
        for source in sorted(self._rows[layer]) if end > first else ():
            if source != self._worker:
                rows = self._count_rows(layer, source)
                into = torch.empty(rows, end - first, dtype=unit.gradient_dtype, device=device)
                receives[layer, source] = into

    def _sum_piece(self, layer: int, own: torch.Tensor | None, came: Receives) -> torch.Tensor:
        parts = {source: rows for (of, source), rows in came.items() if of == layer}
        if own is not None:
            first, end = self._cut(layer, own.shape[1])[self._holders[layer].index(self._worker)]
            parts[self._worker] = own[:, first:end]
        if self._reduction == "ordered":
            by_number = {m: row for w, rows in parts.items() for m, row in zip(self._rows[layer][w], rows, strict=True)}
        else:
            by_number = {self._rows[layer][w][0]: rows[0] for w, rows in parts.items()}
        total: torch.Tensor | None = None
        for number in sorted(by_number):
            total = by_number[number].clone() if total is None else total.add_(by_number[number])
        return total if total is not None else torch.empty(0)

    def _exchange_pieces(self, unit: LayerUnit, sends: Sends, receives: Receives, device: torch.device) -> None:
        """Note that this worker sends the piece that it has summed to the other holders, and gets theirs."""
        layer, piece = unit.number, unit.gradient
        assert piece is not None
        holders, cuts = self._holders[layer], self._cut(layer, unit.gradient_size)
        for holder, (first, end) in zip(holders, cuts, strict=True):
            if holder != self._worker and end > first:
                receives[layer, holder] = torch.empty(end - first, dtype=unit.gradient_dtype, device=device)
        sends += [(piece, other) for other in holders if other != self._worker and piece.numel()]

    def _join_pieces(self, unit: LayerUnit, came: Receives) -> torch.Tensor:
        """Return the whole gradient."""
        layer, piece = unit.number, unit.gradient
        assert piece is not None
        holders, cuts = self._holders[layer], self._cut(layer, unit.gradient_size)
        pieces = [piece if holder == self._worker else came.get((layer, holder)) for holder in holders]
        found = [one for one, (first, end) in zip(pieces, cuts, strict=True) if one is not None and end > first]
        return found[0] if len(found) == 1 else torch.cat(found)


def _swap(sends: Sends, receives: Receives, traffic: RankTraffic) -> None:
    """Send and receive all as one group. Between two workers, both ends list the layers in the same order."""
    for work in traffic.post(sends, [(into, source) for (_, source), into in receives.items()]):
        work.wait()
