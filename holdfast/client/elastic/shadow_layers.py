"""Shadow layers: copies of other workers' layers, kept current so that a worker can take over a lost worker's part."""

import msgspec

from holdfast.core.elastic.layer_owners import Held
from holdfast.core.elastic.shadow_policy import shadows_of
from holdfast.model.pipeline_routes import LayerTransfer, RoutePlan


def add_shadows(plan: RoutePlan, have: Held) -> RoutePlan:
    """Return the plan with shadows: each worker also holds the layers of the workers that it sends to. Workers that
    have a layer by `have` send it to workers that lack it. A rollback needs no such transfers."""
    wanted = [sorted({*mine, *more}) for mine, more in zip(plan.held, shadows_of(plan), strict=True)]
    held = tuple(map(tuple, wanted))
    if plan.rollback:
        return msgspec.structs.replace(plan, held=held)
    sent = {(one.layer, one.target) for one in plan.transfers}
    lacks = [
        (layer, worker)
        for worker, layers in enumerate(wanted)
        for layer in layers
        if layer not in have[worker] and (layer, worker) not in sent
    ]
    owners = {layer: worker for worker, layers in reversed(list(enumerate(have))) for layer in layers}
    more = tuple(LayerTransfer(layer=layer, source=owners[layer], target=worker) for layer, worker in lacks)
    return msgspec.structs.replace(plan, held=held, transfers=plan.transfers + more)
