"""What ranks do before some of them leave: they hand over the layers that nobody else holds, or save all layers."""

from collections.abc import Collection

import msgspec

from holdfast.core.elastic.layer_owners import Held
from holdfast.model.pipeline_routes import LayerTransfer


class DeparturePlan(msgspec.Struct, frozen=True):
    """What ranks do at a known end, after their step."""

    transfers: tuple[LayerTransfer, ...] = ()
    saves: bool = False  # all layers are written to storage
    given_up: int = 0  # layers that nobody else holds, and that are neither handed over nor saved


def plan_departure(
    held: Held, leaving: Collection[int], *, migrates: bool, saves: bool, capacity: int = 0
) -> DeparturePlan:
    """Return what ranks do before some of them leave. Layers that nobody else holds go to those that stay, if it
    `migrates` and each has memory for `capacity` layers (0: for all). Else all layers are saved, if it `saves`. Nothing
    is done if others hold all layers."""
    stay = [mine for worker, mine in enumerate(held) if worker not in leaving]
    orphans = {layer for mine in held for layer in mine}.difference(*stay)
    if not orphans:
        return DeparturePlan()
    found = plan_hand_over(held, leaving) if migrates else ()
    loads = [len(held[worker]) + sum(one.target == worker for one in found) for worker in {one.target for one in found}]
    if found and not (capacity and max(loads) > capacity):
        return DeparturePlan(transfers=found)
    return DeparturePlan(saves=saves, given_up=0 if saves else len(orphans))


def plan_hand_over(held: Held, leaving: Collection[int]) -> tuple[LayerTransfer, ...]:
    """Return for each layer that only leaving workers hold a transfer to a worker that stays. Those that stay get about
    equally many layers. Return nothing if nobody stays."""
    loads = {worker: len(mine) for worker, mine in enumerate(held) if worker not in leaving}
    kept = {layer for worker in loads for layer in held[worker]}
    orphans = {layer: worker for worker in sorted(leaving, reverse=True) for layer in held[worker]}
    found = []
    for layer, source in sorted(orphans.items()):
        if loads and layer not in kept:
            target = min(loads, key=lambda worker: (loads[worker], worker))
            loads[target] += 1
            found.append(LayerTransfer(layer=layer, source=source, target=target))
    return tuple(found)
