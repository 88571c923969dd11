"""Carries out what a plan says about states: transfers between live workers, or a rollback to snapshots or files."""

from collections.abc import Callable, Iterable
from hashlib import blake2b

import torch
import torch.distributed as dist

from holdfast.client.checkpointing.pickle_free_collectives import gather_values
from holdfast.client.elastic.kept_snapshots import KeptSnapshots
from holdfast.client.elastic.layer_files import LayerFiles
from holdfast.client.elastic.layer_state import LayerUnit, digest_packed
from holdfast.client.elastic.packed_layer_transfer import receive_packed, send_packed
from holdfast.client.elastic.rank_traffic import RankTraffic, require_open
from holdfast.client.snapshot.seal_fence import SealPass
from holdfast.model.pipeline_routes import LayerTransfer, RoutePlan

STORAGE = -1
Move = tuple[int, int, int]  # layer, source, target


class LayerMismatch(Exception):
    """Raised if a worker lacks a layer, or if workers have different states of the same layer."""


class StateMoves:
    """Gets the layers that a plan gives to this worker, in the states that the plan begins with."""

    def __init__(
        self,
        make_unit: Callable[[int], LayerUnit],
        snapshots: KeptSnapshots,
        files: LayerFiles,
        traffic: RankTraffic,
        seal: SealPass,
    ) -> None:
        self._make_unit, self._snapshots, self._files = make_unit, snapshots, files
        self._traffic, self._seal = traffic, seal

    def fetch(self, plan: RoutePlan, units: dict[int, LayerUnit], rank: int) -> None:
        """Give `units` the layers of the plan. A worker that sends a layer keeps it until `settle`."""
        step = plan.resume_step - 1
        if plan.rollback:
            self._roll_back(plan, units, rank, step)
            self._snapshots.drop_after(step)
        else:
            moves = [(one.layer, one.source, one.target) for one in plan.transfers]
            self._move(moves, rank, lambda layer: units[layer].pack(), units)

    def copy(self, transfers: Iterable[LayerTransfer], units: dict[int, LayerUnit], rank: int) -> dict[int, LayerUnit]:
        """Send layers of `units` by these transfers; return the copies that came here. All workers call it together."""
        came: dict[int, LayerUnit] = {}
        moves = [(one.layer, one.source, one.target) for one in transfers]
        self._move(moves, rank, lambda layer: units[layer].pack(), came)
        dist.barrier()  # who has sent may leave now
        return came

    def settle(self, plan: RoutePlan, units: dict[int, LayerUnit], rank: int) -> None:
        """Compare all copies of each layer; then drop the layers that the plan gives to others."""
        check_states(units, plan.held[rank], plan.resume_step - 1)
        require_open(self._seal)
        for layer in set(units).difference(plan.held[rank]):
            del units[layer]

    def _roll_back(self, plan: RoutePlan, units: dict[int, LayerUnit], rank: int, step: int) -> None:
        wanted = [(layer, target) for target, held in enumerate(plan.held) for layer in held]
        mine = [layer for layer, target in wanted if target == rank]
        if step == 0:  # as every worker makes them
            for layer in mine:
                units[layer] = self._make_unit(layer)
            return
        for layer in mine:
            source = plan.sources[layer]
            if source == STORAGE:
                self._unpack(units, layer, self._files.read(layer, step))
            elif source == rank:
                self._unpack(units, layer, self._snapshots.find(layer, step))
        moves = [(layer, plan.sources[layer], to) for layer, to in wanted if plan.sources[layer] not in (STORAGE, to)]
        self._move(moves, rank, lambda layer: self._snapshots.find(layer, step), units)

    def _move(
        self,
        moves: Iterable[Move],
        rank: int,
        find: Callable[[int], torch.Tensor],
        units: dict[int, LayerUnit],
    ) -> None:
        """Make these moves, in their order, which is the same on all workers."""
        found: dict[int, torch.Tensor] = {}
        for layer, source, target in moves:
            if source == rank:
                packed = found.setdefault(layer, find(layer) if layer not in found else found[layer])
                send_packed(packed, target, self._traffic)
            elif target == rank:
                self._unpack(units, layer, receive_packed(source, self._traffic))
        self._traffic.settle()

    def _unpack(self, units: dict[int, LayerUnit], layer: int, packed: torch.Tensor) -> None:
        unit = units.get(layer) or self._make_unit(layer)
        unit.unpack(packed)
        units[layer] = unit


def digest_states(units: dict[int, LayerUnit]) -> str:
    """Return a hash of the layers of all workers. All workers call this together."""
    told = gather_values({layer: digest_packed(unit.pack()) for layer, unit in units.items()}, dict[int, str])
    by_layer = {layer: digest for one in told for layer, digest in one.items()}
    return blake2b(repr(sorted(by_layer.items())).encode(), digest_size=16).hexdigest()


def check_states(units: dict[int, LayerUnit], wanted: tuple[int, ...], step: int) -> None:
    """Compare the copies of each layer on all workers that hold it. If a copy differs, or a worker lacks a layer of
    `wanted` at this step, raise LayerMismatch on all workers."""
    late = [layer for layer in wanted if layer not in units or units[layer].step != step or not units[layer].whole]
    mine = {layer: digest_packed(units[layer].pack()) for layer in wanted if layer in units}
    told = gather_values((late, mine), tuple[list[int], dict[int, str]])
    for rank, (lacking, _) in enumerate(told):
        if lacking:
            raise LayerMismatch(f"rank {rank} is without layer {lacking[0]} at step {step}")
    seen: dict[int, tuple[int, str]] = {}
    for rank, (_, digests) in enumerate(told):
        for layer, digest in digests.items():
            first, other = seen.setdefault(layer, (rank, digest))
            if other != digest:
                raise LayerMismatch(f"layer {layer} differs at step {step} between rank {first} and rank {rank}")
