"""The scene that an injector acts on, and the report that it returns."""

import random
from pathlib import Path

import msgspec

from holdfast.chaos.injection_records import CannotInject, InjectedFault, Undo
from holdfast.chaos.job_observer import JobObserver, ObservedNode, ObservedStatus
from holdfast.chaos.undo_guard import UndoGuard


class InjectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an injector did, and which ranks and nodes an alarm should name."""

    what: str
    fault: InjectedFault  # with what was drawn by lot
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    at: float = 0.0  # when, where that is known better than by whoever asked for it
    alarms: tuple[str, ...] | None = None  # that should follow, where it depends on how it was done
    blind: str = ""


class InjectionScene:
    """What a fault needs to be injected into a job: the job's observer, the undo guard and the random source."""

    def __init__(self, sight: JobObserver, guard: UndoGuard, dice: random.Random) -> None:
        self.sight, self.guard, self.dice = sight, guard, dice
        self.links: Path | None = None  # the file that the switch of our lab reads
        self.id = 0
        self.seized: int | None = None  # a rank that is held in the moment that was asked for

    def read_status(self) -> ObservedStatus:
        found = self.sight.read_status()
        if found is None:
            raise CannotInject("the job's controller does not answer")
        return found

    def keep_undo(self, *undo: Undo) -> None:
        self.guard.keep_undo(self.id, *undo)

    def choose_rank(self, fault: InjectedFault, status: ObservedStatus) -> int:
        """Return the rank that the fault names, else the rank that chaos has stopped for it, else a random rank."""
        if fault.rank is not None:
            status.node_of(fault.rank)
            return fault.rank
        if self.seized is not None and fault.node in ("", status.node_of(self.seized)):
            return self.seized
        choice = [rank for node in status.active if fault.node in ("", node.node) for rank in node.rank_range]
        if not choice:
            raise CannotInject(f"no rank runs on {fault.node}" if fault.node else "no rank runs at the moment")
        return self.dice.choice(choice)

    def choose_node(self, fault: InjectedFault, status: ObservedStatus, *, standby: bool = False) -> ObservedNode:
        """Return a random node that fits the fault's node or rank: a node with ranks or, with `standby`, a standby."""
        choice = status.standbys if standby else status.active
        if fault.node:
            choice = [node for node in choice if node.node == fault.node]
        elif fault.rank is not None and not standby:
            choice = [node for node in choice if fault.rank in node.rank_range]
        if not choice:
            what = "standby" if standby else "node with ranks"
            raise CannotInject(f"the job has no {what}{f' {fault.node}' if fault.node else ''} at the moment")
        return self.dice.choice(choice)
