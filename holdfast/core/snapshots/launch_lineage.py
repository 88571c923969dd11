"""The launch that a keeper serves: the state its ranks resume from, and which older snapshots share its lineage."""

import msgspec

from holdfast.model.errand import LaunchHere
from holdfast.model.state_copy import Restore, Source


class KeeperLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The newest launch on a node; before the first one, generation 0."""

    generation: int = 0
    run: str = ""  # who writes checkpoints
    ranks: tuple[int, ...] = ()  # of this node
    restore: Restore = Restore()
    shared_step: int = -1  # last step that it shares with the snapshots held here: later ones are dropped; -1: all are

    def refuse_request(self, generation: int) -> str:
        """Return why a rank of this generation is not served; empty if it is."""
        if generation == self.generation:
            return ""
        return f"generation {generation} is over; the node runs {self.generation}"

    def find_source(self, rank: int) -> Source | None:
        """Return the nodes that hold the rank's state; None if the rank gets no state from memory."""
        return next((source for source in self.restore.sources if source.rank == rank), None)


def read_launch(errand: LaunchHere) -> KeeperLaunch:
    """Return the part of a launch that a keeper needs. A node that was away keeps no older snapshot."""
    seat, restore = errand.seat, errand.restore
    return KeeperLaunch(
        generation=errand.generation,
        run=f"{errand.run_id}.{errand.mark}",
        ranks=tuple(range(seat.first_rank, seat.first_rank + seat.nproc)),
        restore=restore,
        shared_step=restore.step if restore.sources and not errand.astray else -1,
    )
