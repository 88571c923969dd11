"""One rank's state on a node's local disk, and the note that is stored with it."""

import msgspec

from holdfast.checkpoint.image_layout import ImageLayout
from holdfast.checkpoint.manifest import Author
from holdfast.model.state_copy import Copy


class DiskNote(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a state on a node's disk, and whether the state was found good. It lies beside the manifest."""

    layout: ImageLayout
    verified: bool


class DiskState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's state of one step on this disk."""

    url: str
    step: int
    author: Author
    note: DiskNote
    bytes: int

    def matches(self, rank: int, layout: str, step: int | None = None) -> bool:
        """Return whether this is `rank`'s state, of `step` if given, with a layout digest beginning with `layout`."""
        plan = self.note.layout
        return plan.rank == rank and plan.digest.hex().startswith(layout) and step in (None, self.step)

    def describe_copy(self, node: str) -> Copy:
        plan = self.note.layout
        return Copy(
            rank=plan.rank,
            step=self.step,
            node=node,
            layout=plan.digest.hex(),
            world=plan.world,
            whole=True,
            verified=self.note.verified,
            disk=True,
            generation=self.author.generation,
        )
