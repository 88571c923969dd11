"""Which worker holds each layer, which workers lack a layer, and the transfers that fill these gaps."""

from collections.abc import Sequence

from holdfast.model.pipeline_routes import LayerTransfer, PipelineJob, PipelineSituation

Held = tuple[tuple[int, ...], ...]


def owners_by_layer(layers: int, held: Held) -> list[list[int]]:
    """Return for every layer the workers that hold it, in order."""
    found: list[list[int]] = [[] for _ in range(layers)]
    for number, mine in enumerate(held):
        for layer in mine:
            found[layer].append(number)
    return found


def missing_layers(job: PipelineJob, held: Held) -> list[int]:
    """Return the layers that nobody holds."""
    present = {layer for mine in set(held) for layer in mine}
    return [layer for layer in range(job.layers) if layer not in present]


def newcomers(situation: PipelineSituation) -> list[int]:
    """Return the workers that hold no layer yet and are not leaving: standbys, and workers that have just joined."""
    return [n for n, mine in enumerate(situation.held) if not mine and n not in situation.leaving]


def transfers_to(job: PipelineJob, situation: PipelineSituation, wanted: Held) -> tuple[LayerTransfer, ...]:
    """Return the transfers that bring to every worker the layers it should hold. Each layer comes from that live owner
    which has sent the fewest layers so far.

    Every wanted layer must have a live owner.
    """
    lacks = [(n, layer) for n, mine in enumerate(wanted) for layer in mine if layer not in situation.held[n]]
    if not lacks:
        return ()
    owners = owners_by_layer(job.layers, situation.held)
    sent = [0] * len(situation.held)
    found = []
    for target, layer in lacks:
        source = min(owners[layer], key=lambda owner: (sent[owner], owner))
        sent[source] += 1
        found.append(LayerTransfer(layer=layer, source=source, target=target))
    return tuple(found)


def busiest_link(transfers: Sequence[LayerTransfer]) -> int:
    """Return the largest number of layers that one worker sends or receives."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for transfer in transfers:
        sent[transfer.source] = sent.get(transfer.source, 0) + 1
        received[transfer.target] = received.get(transfer.target, 0) + 1
    return max([0, *sent.values(), *received.values()])


def fits_memory(job: PipelineJob, held: Held) -> bool:
    return not job.capacity or max(map(len, held), default=0) <= job.capacity


def spare_copies(layers: int, held: Held, leaving: Sequence[int] = ()) -> int:
    """Return how many workers may be lost before a layer has no owner, whichever workers they are. Leaving workers do
    not count as owners."""
    counts = [0] * layers
    for number, mine in enumerate(held):
        if number not in leaving:
            for layer in mine:
                counts[layer] += 1
    return max(0, min(counts, default=0) - 1)


def added_memory(before: Held, after: Held) -> int:
    return max(0, max(map(len, after), default=0) - max(map(len, before), default=0))
