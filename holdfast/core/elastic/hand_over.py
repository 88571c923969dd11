"""What ranks hand over before some of them leave: the layers that nobody else holds."""

from collections.abc import Collection

from holdfast.core.elastic.layer_owners import Held
from holdfast.model.pipeline_routes import LayerTransfer


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
