"""The launch that a keeper serves: the state its ranks resume from, and which older snapshots share its lineage."""

import msgspec

from holdfast.core.snapshots.lineage import Line, is_of_line
from holdfast.model.job_and_seats import marked_run_id
from holdfast.model.node_errands import LaunchHere
from holdfast.model.restore_sources import Restore, Source


class KeeperLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The newest launch on a node; its generation is 0 before the first launch."""

    generation: int = 0
    run: str = ""  # who writes checkpoints
    ranks: tuple[int, ...] = ()  # of this node
    restore: Restore = Restore()
    shared_step: int = -1  # last step that it shares with the snapshots held here: later ones are dropped; -1: all are
    line: Line = ()  # this launch and those before it; empty: not told

    def is_of_line(self, generation: int, step: int) -> bool:
        """Return whether a state belongs to this launch's lineage. The state is named by its step and a generation that
        had it."""
        return is_of_line(self.line, self.generation, generation, step)

    def drops(self, generation: int, step: int) -> bool:
        """Return whether a snapshot or copy in memory belongs to a lineage that this launch abandons."""
        return step > self.shared_step or not self.is_of_line(generation, step)

    def gives_up(self, generation: int, step: int) -> bool:
        """Return whether to drop a state from disk. A state is dropped if it is in doubt, or if the last generation
        made it after the step from which this launch resumes. States of older lineages stay until every disk holds a
        later step, because this launch may fail. The controller says which of these states may be used."""
        if any(doubt.bans_state(generation, step) for doubt in self.restore.doubts):
            return True
        return self.restore.is_held and generation == self.generation - 1 and step > self.restore.step

    def refuse_request(self, generation: int) -> str:
        """Return why a rank of this generation is not served; empty if it is."""
        if generation == self.generation:
            return ""
        return f"generation {generation} is over; the node runs {self.generation}"

    def find_source(self, rank: int) -> Source | None:
        """Return the nodes to get the rank's state from; None if the launch gives the rank no state."""
        return next((source for source in self.restore.sources if source.rank == rank), None)


def read_launch(errand: LaunchHere) -> KeeperLaunch:
    """Return what a keeper needs of a launch. A node that was away drops all its snapshots in memory."""
    seat, restore = errand.seat, errand.restore
    return KeeperLaunch(
        generation=errand.generation,
        run=marked_run_id(errand.run_id, errand.mark),
        ranks=tuple(seat.ranks),
        restore=restore,
        shared_step=restore.step if restore.is_held and not errand.astray else -1,
        line=errand.line,
    )
