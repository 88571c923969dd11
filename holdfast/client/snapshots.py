"""The snapshots of this rank: an arena and the images in it, written by one pass of copies."""

import torch

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.copying import Copier
from holdfast.checkpoint.layout import Layout
from holdfast.checkpoint.state import EXTRA, Image, StateError
from holdfast.client.found import ABSENT


class Snapshots:
    """Everything that can be done beforehand is: memory is at hand, and what never changes is written."""

    def __init__(self, layout: Layout, arena: Arena, path: str) -> None:
        self.layout = layout
        self.arena = arena
        self.path = path
        self.copier = Copier()
        self.extra = next(index for index, item in enumerate(layout.items) if item.spec.key == EXTRA)
        arena.touch()
        self.images = [Image(layout, arena.image(slot)) for slot in range(arena.slots)]
        # What lies in a whole slot may have to be restored yet: nothing of it is touched before it is given up.
        whole = {sealed.slot for sealed in arena.sealed()}
        self._unstamped = whole
        for slot in set(range(arena.slots)) - whole:
            self.images[slot].stamp()

    def absent(self, things: list[object]) -> list[str]:
        """The keys for which there is nothing now."""
        found = (item.spec.key for item, thing in zip(self.layout.items, things, strict=True) if thing is ABSENT)
        return sorted({*found} - {EXTRA})

    def take(self, name: tuple[int, int], things: list[object], packed: bytes) -> int | None:
        """Copy it all, as step and generation; the slot it lies in, or None if none was free."""
        if len(packed) > (most := self.layout.items[self.extra].spec.bytes):
            raise StateError(f"the extras have outgrown their room of {most} bytes, twice what they were at the start")
        slot = self.arena.begin(*name)
        if slot is None:
            return None
        image = self.image(slot.index)
        moves = []
        with torch.no_grad():
            for index, thing in enumerate(things):
                if isinstance(thing, torch.Tensor):
                    moves.append(image.put(index, thing))
                elif thing is not ABSENT:
                    image.put_value(index, thing)
        self.copier.run(filter(None, moves))
        image.put_bytes(self.extra, packed)
        slot.seal()
        return slot.index

    def image(self, slot: int) -> Image:
        """The image in a slot that is about to be written."""
        if slot in self._unstamped:
            self.images[slot].stamp()
            self._unstamped.discard(slot)
        return self.images[slot]
