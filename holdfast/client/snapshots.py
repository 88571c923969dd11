"""The snapshots of this rank: an arena and the images in it, written by one pass of copies."""

from collections.abc import Callable, Sequence

import torch

from holdfast.checkpoint.arena import Arena, Name, Sealed
from holdfast.checkpoint.copying import Copier
from holdfast.checkpoint.layout import EXTRA, Layout
from holdfast.checkpoint.state import Image, StateError
from holdfast.client.fetching import Fetching
from holdfast.client.found import ABSENT, Things
from holdfast.client.side import Side
from holdfast.client.streams import Registered, Streams


class Snapshots:
    """Everything that can be done beforehand is: memory is at hand, and what never changes is written."""

    def __init__(self, layout: Layout, arena: Arena, path: str) -> None:
        self.layout = layout
        self.arena = arena
        self.path = path
        self.extra = next(index for index, item in enumerate(layout.items) if item.spec.key == EXTRA)
        self.side: Side | None = None
        self._copier = Copier()
        self._registered: Registered | None = None
        self.fetching: Fetching | None = None
        self.images = [Image(layout, arena.image(slot)) for slot in range(arena.slots)]
        # In a whole slot it is written already, and what lies there may have to be restored yet.
        for slot in set(range(arena.slots)) - {sealed.slot for sealed in arena.sealed()}:
            self.images[slot].stamp()

    def touch(self) -> None:
        """The processor makes the copies."""
        self.arena.touch()

    def beside(self, device: torch.device, guarded: Sequence[bool], say: Callable[[str], None]) -> Side:
        """From now on the GPU makes the copies."""
        self._registered = registered = Registered(self.arena, self.layout, device, say)
        for slot, image in enumerate(self.images):
            image.wait = lambda end, slot=slot: registered.wait(slot, end)  # type: ignore[misc]
        if self.arena.sealed():  # it will most likely be restored
            self.fetching = Fetching(lambda: Streams(device))
        else:
            registered.begin()
        self.side = Side(self.layout, self.arena, guarded, Streams(device), registered.wait)
        return self.side

    def restored(self) -> None:
        """Nothing has to be read any more: make ready for the first snapshot."""
        if self.fetching:
            self.fetching.finish()
            self.fetching = None
        if self._registered:
            self._registered.begin()

    def take(self, name: Name, things: Things, packed: bytes) -> Sealed | None:
        """Copy it all; None if no slot was free. What a GPU copies is sealed a little later."""
        if len(packed) > (most := self.layout.items[self.extra].spec.bytes):
            raise StateError(f"the extras have outgrown their room of {most} bytes, twice what they were at the start")
        if self.side and self.side.takes(things):
            claim = self.side.take(name, things, packed)
            named = {"step": name.step, "generation": name.generation, "flags": name.flags}
            return Sealed(slot=claim.slot, seq=claim.seq + 1, at=claim.at, **named) if claim else None
        if self.side:
            self.side.drain()
        return self._copied(name, things, packed)

    def close(self) -> None:
        """Wait until all that was taken is sealed."""
        if self.side:
            self.side.drain()

    def release(self) -> None:
        """Nothing more will be taken: let the memory go."""
        self.close()
        if self._registered:
            self._registered.close()

    def _copied(self, name: Name, things: Things, packed: bytes) -> Sealed | None:
        slot = self.arena.begin(name.step, name.generation, name.flags)
        if slot is None:
            return None
        image = self.images[slot.index]
        moves = []
        with torch.no_grad():
            for index, thing in enumerate(things.all):
                if isinstance(thing, torch.Tensor):
                    moves.append(image.put(index, thing))
                elif thing is not ABSENT:
                    image.put_value(index, thing)
        self._copier.run(filter(None, moves))
        image.put_bytes(self.extra, packed)
        slot.seal()
        return self.arena.sealed()[0]
