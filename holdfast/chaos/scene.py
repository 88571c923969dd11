"""What an injector is given, and what it answers."""

import random
from pathlib import Path

import msgspec

from holdfast.chaos.fault import Cannot, Fault, Undo
from holdfast.chaos.guard import Guard
from holdfast.chaos.sight import Node, Sight, Status


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """What was done; whom an alarm should name."""

    what: str
    fault: Fault  # with what was drawn by lot
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    at: float = 0.0  # when, where that is known better than by whoever asked for it
    alarms: tuple[str, ...] | None = None  # that should follow, where it depends on how it was done
    blind: str = ""


class Scene:
    """One fault on one job."""

    def __init__(self, sight: Sight, guard: Guard, dice: random.Random) -> None:
        self.sight, self.guard, self.dice = sight, guard, dice
        self.links: Path | None = None  # the file that the switch of our lab reads
        self.id = 0
        self.seized: int | None = None  # a rank that is held in the moment that was asked for

    def status(self) -> Status:
        found = self.sight.status()
        if found is None:
            raise Cannot("the job's controller does not answer")
        return found

    def keep(self, *undo: Undo) -> None:
        self.guard.keep(self.id, *undo)

    def rank(self, fault: Fault, status: Status) -> int:
        """The rank that was asked for, the one that is held, or one by lot: of the node that was asked for."""
        if fault.rank is not None:
            status.node_of(fault.rank)
            return fault.rank
        if self.seized is not None and fault.node in ("", status.node_of(self.seized)):
            return self.seized
        choice = [rank for node in status.active if fault.node in ("", node.node) for rank in node.numbers]
        if not choice:
            raise Cannot(f"no rank runs on {fault.node}" if fault.node else "no rank runs at the moment")
        return self.dice.choice(choice)

    def node(self, fault: Fault, status: Status, *, standby: bool = False) -> Node:
        """The node that was asked for, by its name or one of its ranks, or one by lot."""
        choice = status.standbys if standby else status.active
        if fault.node:
            choice = [node for node in choice if node.node == fault.node]
        elif fault.rank is not None and not standby:
            choice = [node for node in choice if fault.rank in node.numbers]
        if not choice:
            what = "standby" if standby else "node with ranks"
            raise Cannot(f"the job has no {what}{f' {fault.node}' if fault.node else ''} at the moment")
        return self.dice.choice(choice)
