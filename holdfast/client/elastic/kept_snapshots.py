"""Snapshots of layers in memory. Each worker keeps its own snapshots and, in a ring, those of one other worker."""

import torch
import torch.distributed as dist

from holdfast.client.elastic.layer_state import LayerUnit, read_header
from holdfast.client.elastic.packed_layer_transfer import swap_packed
from holdfast.client.elastic.rank_traffic import RankTraffic
from holdfast.model.pipeline_routes import RoutePlan

_STEPS = 2  # that are kept, as a worker may be lost while the newest is made


class KeptSnapshots:
    """The packed layers that are kept in this worker's memory."""

    def __init__(self) -> None:
        self._packed: dict[tuple[int, int], torch.Tensor] = {}  # by layer and step

    def list_snapshots(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self._packed))

    def find(self, layer: int, step: int) -> torch.Tensor:
        return self._packed[layer, step]

    def take(self, step: int, units: dict[int, LayerUnit], traffic: RankTraffic, *, reach: int, layers: int) -> None:
        """Keep this worker's packed layers and send them to the worker whose rank is higher by `reach`. Keep those of
        the worker whose rank is lower by `reach`; ranks form a ring. All workers call this at the same step. `layers`
        is the number of all layers."""
        mine = {layer: units[layer].pack() for layer in sorted(units)}
        world, rank = dist.get_world_size(), dist.get_rank()
        came: dict[int, torch.Tensor] = {}
        if reach % world:
            swapped = swap_packed(list(mine.values()), (rank + reach) % world, (rank - reach) % world, layers, traffic)
            came = {read_header(packed)[0].layer: packed for packed in swapped}
        fresh = {(layer, step): packed for layer, packed in (came | mine).items()}
        kept = sorted({old for _, old in self._packed if old != step})[-(_STEPS - 1) :]
        self._packed = {key: one for key, one in self._packed.items() if key[1] in kept} | fresh

    def drop_after(self, step: int) -> None:
        """Drop the snapshots of steps after this one, because the job will make these again."""
        self._packed = {key: one for key, one in self._packed.items() if key[1] <= step}


def choose_reach(plan: RoutePlan, node_ranks: int) -> int:
    """Choose the distance, in ranks, from each worker to the worker that gets copies of its snapshots. A good distance
    leads to workers with other layers, then to workers on other nodes. Return 0 if there is only one worker."""
    world = len(plan.held)
    tried = {one % world for one in (1, node_ranks, node_ranks + 1, node_ranks - 1, 2 * node_ranks + 1)} - {0}

    def weigh(reach: int) -> tuple[int, int, int]:
        pairs = [(worker, (worker + reach) % world) for worker in range(world)]
        alike = sum(not set(plan.held[one]).isdisjoint(plan.held[other]) for one, other in pairs)
        near = sum(one // node_ranks == other // node_ranks for one, other in pairs)
        return alike, near, reach

    return min(tried, key=weigh, default=0)
