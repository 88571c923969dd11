"""The state of a rank that was lost with its node, or moved: gathered from whoever still holds it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from holdfast.agent.apart import Asking, Laid, Run
from holdfast.checkpoint.layout import Item, Layout
from holdfast.checkpoint.transport import Ask, Callee, Guard, TransportError, fetch
from holdfast.core.decoding import from_msgpack
from holdfast.model.copy import Kept, Restore

T = TypeVar("T")


class Gathering:
    """One rank's image, from the keepers that a restore names."""

    def __init__(self, restore: Restore, rank: int, guard: Guard | None) -> None:
        self._restore = restore
        self._rank = rank
        self._guard = guard

    def plan(self) -> Layout:
        """The layout of the image, from a node that has the rank's own part."""
        return self._tried(self._kept(self._rank), self._layout)

    def fill(self, plan: Layout, image: memoryview) -> str:
        """Fetch it all; the answer says from whom."""
        whole = [kept for kept in self._kept(self._rank) if kept.whole]
        if whole:
            everything = ((0, plan.image_bytes, 0),)
            return self._tried(whole, lambda kept: self._pull(kept, everything, image))
        owners = sorted({item.owner for item in plan.items}, key=lambda owner: (owner != self._rank, owner))
        nodes = [node for owner in owners for node in self._part(plan, owner, image)]
        return ", ".join(dict.fromkeys(nodes))

    def _part(self, plan: Layout, owner: int, image: memoryview) -> list[str]:
        """What one rank sends and persists for all its replicas; the answer says from whom."""
        holders = self._kept(owner)

        def theirs(kept: Kept) -> Layout:
            return plan if owner == self._rank else self._layout(kept)

        copies = [kept for kept in holders if kept.half < 0]
        if copies or not holders:
            return [self._tried(copies, lambda kept: self._pull(kept, tuple(_runs(plan, theirs(kept), owner)), image))]
        nodes = []
        for half in (0, 1):
            laid = [kept for kept in holders if kept.half == half]
            nodes += self._tried(laid, lambda kept: self._told_apart(kept, theirs(kept), plan, image))
        return nodes

    def _told_apart(self, kept: Kept, theirs: Layout, plan: Layout, image: memoryview) -> list[str]:
        """One half of an owner's share: the parity, and what it was laid over."""

        def with_other(other: Kept) -> list[str]:
            laid = Laid(self._asking(kept), self._asking(other), theirs, self._layout(other))
            laid.fill(image, tuple(_runs(plan, theirs, kept.rank)))
            return [kept.node, other.node]

        return self._tried([other for other in self._kept(kept.beside) if other.whole], with_other)

    def _asking(self, kept: Kept) -> Asking:
        pair = None
        if kept.half >= 0:
            pair = (kept.rank, kept.beside) if kept.half == 0 else (kept.beside, kept.rank)
        ask = Ask(verb="pull", rank=kept.rank, layout=kept.layout, step=self._restore.step, pair=pair)
        return Asking(self._keeper(kept.node), ask)

    def _keeper(self, node: str) -> Callee:
        return Callee(self._restore.keepers[node], self._guard)

    def _pull(self, kept: Kept, runs: Sequence[Run], image: memoryview) -> str:
        ranges = [(start, end) for start, end, _ in runs]
        self._asking(kept).pull(ranges, [image[to : to + end - start] for start, end, to in runs])
        return kept.node

    def _layout(self, kept: Kept) -> Layout:
        ask = Ask(verb="plan", rank=kept.rank, layout=kept.layout)
        content = fetch(self._keeper(kept.node), ask)
        try:
            return from_msgpack(content, Layout)
        except msgspec.DecodeError as e:
            raise TransportError(f"the layout of rank {kept.rank} cannot be read: {e}") from None

    def _kept(self, rank: int) -> list[Kept]:
        """Who has it, the rank's own node first: then nothing goes over a network."""
        named = next((source.nodes for source in self._restore.sources if source.rank == rank), ())
        found = [k for k in self._restore.kept if k.rank == rank and k.node in self._restore.keepers]
        return sorted(found, key=lambda kept: (kept.node not in named, not kept.whole, kept.node))

    def _tried(self, holders: list[Kept], do: Callable[[Kept], T]) -> T:
        """One holder after the other, until one can."""
        why = "nobody has it"
        for kept in holders:
            try:
                return do(kept)
            except TransportError as e:
                why = f"{kept.node}: {e}"
        raise TransportError(f"step {self._restore.step} of rank {self._rank} cannot be had: {why}")


def _runs(ours: Layout, theirs: Layout, owner: int) -> Iterator[Run]:
    """What an owner holds of our image, as it lies in the owner's; neighbours in both are fetched together."""
    places = {_name(item): (index, item) for index, item in enumerate(theirs.items) if item.owner == owner}
    run: Run | None = None
    before = (-2, -2)
    for index, item in enumerate(ours.items):
        if item.owner != owner:
            continue
        there_index, there = places.get(_name(item), (-1, None))
        if there is None or there.length != item.length:
            raise TransportError(f"rank {owner} laid out {item.spec.key} in another way")
        follows = (index, there_index) == (before[0] + 1, before[1] + 1)
        if run and follows and item.offset - run[2] == there.offset - run[0]:
            run = (run[0], there.end, run[2])
        else:
            if run:
                yield run
            run = (there.offset, there.end, item.offset)
        before = (index, there_index)
    if run:
        yield run


def _name(item: Item) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return item.spec.key, item.spec.group, item.spec.start, item.spec.shape
