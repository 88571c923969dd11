"""The state that a launch resumes from: which step, and which nodes each rank gets it from."""

import msgspec

from holdfast.model.state_copy import Address, CopySummary
from holdfast.model.state_doubt import Doubt


class LaunchOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The state that one launch resumed from."""

    generation: int
    step: int = -1  # -1: from storage, or from nothing
    maker: int = 0  # the generation that made this step; 0: not known any more
    stepped: bool = False  # the launch has told of a step


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes from which one rank gets its state, in the order in which to ask them."""

    rank: int
    own: bool  # it lies on the rank's own node
    nodes: tuple[str, ...] = ()
    disk: bool = False  # on their disks: no node's memory has it


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """The step from which all ranks of the next generation resume, and its sources. By default: step 0, no sources."""

    step: int = 0
    maker: int = 0  # the generation that made this step; 0: not known
    sources: tuple[Source, ...] = ()
    kept: tuple[CopySummary, ...] = ()  # all that nodes hold of this step, for ranks whose state has to be gathered
    keepers: dict[str, Address] = {}  # of the nodes that hold it
    doubts: tuple[Doubt, ...] = ()
    store: bool = False  # it becomes a checkpoint: another release goes on with it
    stored: int = -1  # without sources: the newest checkpoint that is on storage, as far as nodes have reported
    reason: str = ""
    apart: str = ""  # without sources: which step is held for which rank, if none is held for all
    replicated: bool = False  # every rank's state is the whole: a rank takes one of its node, or another rank's
    cut_from: int = 0  # as many ranks have saved it: it is cut anew for the ranks of this launch; 0: it is not cut
    uncut: str = ""  # why a newer state, which another number of ranks has saved, cannot be cut anew
    doubted: int = -1  # without sources: the newest state that may not be restored, as it is in doubt; -1: none is

    @property
    def is_held(self) -> bool:
        """Return whether ranks get this step from memory or disks, not from storage."""
        return bool(self.sources) or self.is_of_any_size

    @property
    def is_of_any_size(self) -> bool:
        """Return whether the step may have been saved by another number of ranks."""
        return self.replicated or self.cut_from > 0
