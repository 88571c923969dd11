"""Which worker holds each layer, which workers lack a layer, and the transfers that fill these gaps."""

from collections import Counter
from collections.abc import Sequence
from heapq import heapreplace

from holdfast.model.pipeline_routes import LayerTransfer, PipelineJob, PipelineSituation, RouteSegment

Held = tuple[tuple[int, ...], ...]


def owners_by_layer(layers: int, held: Held) -> list[list[int]]:
    """Return for every layer the workers that hold it, in order."""
    found: list[list[int]] = [[] for _ in range(layers)]
    for number, mine in enumerate(held):
        for layer in mine:
            found[layer].append(number)
    return found


def count_alike(held: Held, leaving: Sequence[int] = ()) -> Counter[tuple[int, ...]]:
    """Return how many workers hold each choice of layers. Leaving workers do not count."""
    counts = Counter(held)
    counts.subtract(held[number] for number in set(leaving))
    return +counts


def count_owners(layers: int, alike: Counter[tuple[int, ...]]) -> list[int]:
    """Return for every layer how many workers hold it."""
    counts = [0] * layers
    for mine, count in alike.items():
        for layer in mine:
            counts[layer] += count
    return counts


class HeldRuns:
    """Answers whether workers hold runs of layers. Workers that hold the same are looked at once."""

    def __init__(self, held: Held, away: Sequence[int] = ()) -> None:
        self.held, self.away = held, frozenset(away)  # `away` are workers that must get no work
        self._ends: dict[tuple[tuple[int, ...], int, int], int] = {}

    def run_end(self, worker: int, first: int, end: int) -> int:
        """Return up to where a worker holds the layers from `first` to, at most, `end`."""
        key = (self.held[worker], first, end)
        known = self._ends.get(key)
        if known is None:
            mine = frozenset(key[0])
            known = self._ends[key] = next((layer for layer in range(first, end) if layer not in mine), end)
        return known

    def can_compute(self, segment: RouteSegment) -> bool:
        """Return whether a segment has a worker that may work, and whether this worker holds all layers of it."""
        worker = segment.worker
        if worker < 0 or worker in self.away:
            return False
        return self.run_end(worker, segment.first, segment.end) >= segment.end


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
    pairs = zip(wanted, situation.held, strict=True)
    changed = [(n, mine, has) for n, (mine, has) in enumerate(pairs) if mine != has]
    lacks = [(n, layer) for n, mine, has in changed for layer in mine if layer not in has]
    if not lacks:
        return ()
    wants = sorted({layer for _, layer in lacks})
    queues = {layer: [(0, n) for n, mine in enumerate(situation.held) if layer in mine] for layer in wants}
    sent = [0] * len(situation.held)
    found = []
    for target, layer in lacks:
        source = _take_source(queues[layer], sent)
        found.append(LayerTransfer(layer=layer, source=source, target=target))
    return tuple(found)


def _take_source(queue: list[tuple[int, int]], sent: list[int]) -> int:
    """Return the owner in a heap that has sent the fewest layers, and count one more for it."""
    while True:
        before, source = queue[0]
        now = sent[source]
        if now == before:
            break
        heapreplace(queue, (now, source))  # it has sent another layer since
    sent[source] += 1
    heapreplace(queue, (now + 1, source))
    return source


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
    return max(0, min(count_owners(layers, count_alike(held, leaving)), default=0) - 1)


def added_memory(before: Held, after: Held) -> int:
    return max(0, max(map(len, after), default=0) - max(map(len, before), default=0))
