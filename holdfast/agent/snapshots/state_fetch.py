"""Fetches the state of a rank that was lost with its node, or moved, from the keepers that still hold it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from holdfast.agent.snapshots.keeper_interfaces import KeeperLinks
from holdfast.agent.snapshots.parity_decoder import KeeperSource, ParityDecoder, Run
from holdfast.checkpoint.image_layout import ImageItem, ImageLayout
from holdfast.checkpoint.peer_transport import LinkError, PeerRequest, TransportError
from holdfast.decoding import from_msgpack
from holdfast.model.restore_sources import Restore
from holdfast.model.state_copy import CopySummary

T = TypeVar("T")


class StateFetch:
    """Fetches one rank's image from the keepers that a Restore lists."""

    def __init__(self, restore: Restore, rank: int, links: KeeperLinks) -> None:
        self._restore = restore
        self._rank = rank
        self._links = links

    def fetch_layout(self) -> ImageLayout:
        """Fetch the image's layout from a node with the rank's own state; raise TransportError if none answers."""
        return self._try_each(self._copies_of(self._rank), self._layout_from)

    def fill_image(self, plan: ImageLayout, image: memoryview) -> str:
        """Fetch the whole image; return the names of the nodes that it came from."""
        whole = [kept for kept in self._copies_of(self._rank) if kept.whole]
        if whole:
            everything = ((0, plan.image_bytes, 0),)
            return self._try_each(whole, lambda kept: self._pull_runs(kept, everything, image))
        owners = sorted({item.owner for item in plan.items}, key=lambda owner: (owner != self._rank, owner))
        nodes = [node for owner in owners for node in self._fetch_share(plan, owner, image)]
        return ", ".join(dict.fromkeys(nodes))

    def _fetch_share(self, plan: ImageLayout, owner: int, image: memoryview) -> list[str]:
        """Fetch the part of the image that `owner` owns: one copy, or two halves by parity. Return the source nodes."""
        holders = self._copies_of(owner)

        def theirs(kept: CopySummary) -> ImageLayout:
            return plan if owner == self._rank else self._layout_from(kept)

        copies = [kept for kept in holders if kept.half < 0]
        if copies or not holders:
            return [
                self._try_each(
                    copies, lambda kept: self._pull_runs(kept, tuple(_matching_runs(plan, theirs(kept), owner)), image)
                )
            ]
        nodes = []
        for half in (0, 1):
            laid = [kept for kept in holders if kept.half == half]
            nodes += self._try_each(laid, lambda kept: self._decode_half(kept, theirs(kept), plan, image))
        return nodes

    def _decode_half(self, kept: CopySummary, theirs: ImageLayout, plan: ImageLayout, image: memoryview) -> list[str]:
        """Decode one half of a rank's share from a parity and the paired rank's state; return the nodes of both."""

        def with_other(other: CopySummary) -> list[str]:
            laid = ParityDecoder(self._source_for(kept), self._source_for(other), theirs, self._layout_from(other))
            laid.decode_runs(image, tuple(_matching_runs(plan, theirs, kept.rank)))
            return [kept.node, other.node]

        return self._try_each([other for other in self._copies_of(kept.beside) if other.whole], with_other)

    def _source_for(self, kept: CopySummary) -> KeeperSource:
        pair = None
        if kept.half >= 0:
            pair = (kept.rank, kept.beside) if kept.half == 0 else (kept.beside, kept.rank)
        ask = PeerRequest(verb="pull", rank=kept.rank, layout=kept.layout, step=self._restore.step, pair=pair)
        ask = msgspec.structs.replace(ask, generation=kept.generation)
        return KeeperSource(self._links, self._restore.keepers[kept.node], ask)

    def _pull_runs(self, kept: CopySummary, runs: Sequence[Run], image: memoryview) -> str:
        ranges = [(start, end) for start, end, _ in runs]
        self._source_for(kept).pull_ranges(ranges, [image[to : to + end - start] for start, end, to in runs])
        return kept.node

    def _layout_from(self, kept: CopySummary) -> ImageLayout:
        ask = PeerRequest(verb="plan", rank=kept.rank, layout=kept.layout)
        content = self._links.fetch_content(self._restore.keepers[kept.node], ask)
        try:
            return from_msgpack(content, ImageLayout)
        except msgspec.DecodeError as e:
            raise TransportError(f"cannot decode the layout of rank {kept.rank}: {e}") from None

    def _copies_of(self, rank: int) -> list[CopySummary]:
        """Return copies of a rank's state, best first: those on its source nodes, then whole images, then others."""
        named = next((source.nodes for source in self._restore.sources if source.rank == rank), ())
        found = [k for k in self._restore.kept if k.rank == rank and k.node in self._restore.keepers]
        return sorted(found, key=lambda kept: (kept.node not in named, not kept.whole, kept.node))

    def _try_each(self, holders: Sequence[CopySummary], do: Callable[[CopySummary], T]) -> T:
        return try_each_holder(holders, do, f"the state of rank {self._rank} at step {self._restore.step}")


def try_each_holder(holders: Sequence[CopySummary], do: Callable[[CopySummary], T], state: str) -> T:
    """Call `do` for one holder of a state after another and return the first result. Raise TransportError if all fail;
    raise a LinkError if some holder may be out of reach only for now."""
    why, error = "no node has it", TransportError
    for kept in holders:
        try:
            return do(kept)
        except TransportError as e:
            why = f"{kept.node}: {e}"
            error = LinkError if isinstance(e, LinkError) else error
    raise error(f"cannot fetch {state}: {why}")


def _matching_runs(ours: ImageLayout, theirs: ImageLayout, owner: int) -> Iterator[Run]:
    """Yield each range that `owner` owns: its start and end in an image of layout `theirs`, its start in `ours`."""
    places = {_item_key(item): (index, item) for index, item in enumerate(theirs.items) if item.owner == owner}
    run: Run | None = None
    before = (-2, -2)
    for index, item in enumerate(ours.items):
        if item.owner != owner:
            continue
        there_index, there = places.get(_item_key(item), (-1, None))
        if there is None or there.length != item.length:
            raise TransportError(f"rank {owner} has {item.spec.key} in another layout")
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


def _item_key(item: ImageItem) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return item.spec.key, item.spec.group, item.spec.start, item.spec.shape
