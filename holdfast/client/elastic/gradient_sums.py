"""Sums the gradients of a step over its microbatches. The sums are equal in every bit on all workers that hold a layer.

A layer's flat gradient is cut into as many pieces as workers hold the layer; each of these holders sums one piece.
Every worker that computed the layer sends each piece to its holder, and the holder sends the sum to the other holders.
With the reduction "ordered", a holder sums by microbatch number, so all routes give the same bits. With "float", each
worker first adds up its own microbatches; the holder sums these in the order of each worker's first microbatch.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import torch

from holdfast.client.elastic.layer_state import LayerUnit
from holdfast.client.elastic.rank_traffic import RankTraffic
from holdfast.model.pipeline_routes import RoutePlan

Reduction = Literal["ordered", "float"]
Rows = dict[int, list[int]]  # by worker: the microbatches of which it has a layer's gradient


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
        """Give each unit the sum of its gradients over all microbatches, and remove the gradients of microbatches."""
        mine = [layer for layer in sorted(units) if units[layer].parameters]
        own = {layer: self._stack(gradients, layer) for layer in mine}
        gradients.clear()
        waits: dict[int, list[tuple[int, torch.Tensor, Any]]] = {layer: [] for layer in mine}
        for layer in mine:
            self._exchange(units[layer], own[layer], waits[layer], traffic)
        for layer in mine:
            for _, _, work in waits[layer]:
                work.wait()
            units[layer].gradient = self._sum_piece(layer, own[layer], waits[layer])
        for layer in mine:
            units[layer].gradient = self._gather_pieces(units[layer], traffic)
        traffic.settle()

    def _stack(self, gradients: dict[tuple[int, int], torch.Tensor], layer: int) -> torch.Tensor | None:
        numbers = self._rows[layer].get(self._worker, [])
        if not numbers:
            return None
        if self._reduction == "ordered":
            return torch.stack([gradients[layer, m] for m in numbers])
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

    def _exchange(
        self,
        unit: LayerUnit,
        own: torch.Tensor | None,
        waits: list[tuple[int, torch.Tensor, Any]],
        traffic: RankTraffic,
    ) -> None:
        layer, size = unit.number, unit.gradient_size
        holders, cuts = self._holders[layer], self._cut(layer, size)
        for holder, (first, end) in zip(holders, cuts, strict=True):
            if holder != self._worker and own is not None and end > first:
                traffic.send(own[:, first:end].contiguous(), holder, 2 * layer)
        first, end = cuts[holders.index(self._worker)]
        for source in sorted(self._rows[layer]) if end > first else ():
            if source != self._worker:
                rows = self._count_rows(layer, source)
                into = torch.empty(rows, end - first, dtype=unit.gradient_dtype, device=traffic.device)
                waits.append((source, into, traffic.start_receive(into, source, 2 * layer)))

    def _sum_piece(
        self,
        layer: int,
        own: torch.Tensor | None,
        came: list[tuple[int, torch.Tensor, Any]],
    ) -> torch.Tensor:
        parts = {source: rows for source, rows, _ in came}
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

    def _gather_pieces(self, unit: LayerUnit, traffic: RankTraffic) -> torch.Tensor:
        """Send the piece that this worker has summed to the other holders, and return the whole gradient."""
        layer, size = unit.number, unit.gradient_size
        piece = unit.gradient
        assert piece is not None
        holders, cuts = self._holders[layer], self._cut(layer, size)
        if len(holders) == 1:
            return piece
        whole = torch.empty(size, dtype=unit.gradient_dtype, device=traffic.device)
        works = []
        for holder, (first, end) in zip(holders, cuts, strict=True):
            if holder == self._worker:
                whole[first:end] = piece
            elif end > first:
                into = torch.empty(end - first, dtype=unit.gradient_dtype, device=traffic.device)
                works.append(
                    (
                        first,
                        end,
                        into,
                        traffic.start_receive(into, holder, 2 * layer + 1),
                    )
                )
        for other in holders if piece.numel() else ():
            if other != self._worker:
                traffic.send(piece, other, 2 * layer + 1)
        for first, end, into, work in works:
            work.wait()
            whole[first:end] = into
        return whole
