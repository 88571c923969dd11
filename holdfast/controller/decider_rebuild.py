"""Rebuilds a decider from its journal."""

from collections.abc import Iterator

import msgspec

from holdfast.controller_interfaces import Journal
from holdfast.core.decide.decider import Decider
from holdfast.model.action import Say
from holdfast.model.journal_entry import Decision, Entry


class RebuildError(Exception):
    """This version of the decider requests other actions than those in the journal. The argument is the number of the
    entry."""

    def __init__(self, seq: int) -> None:
        otherwise = f"this version of holdfast decides otherwise than entry {seq} of the journal"
        super().__init__(f"{otherwise}; run the job with the version that wrote it")
        self.seq = seq


def rebuild_decider(journal: Journal, decider: Decider) -> Iterator[Entry]:
    """Step the decider through the journal and yield each entry. Raise RebuildError if it requests other actions than
    those in the journal."""
    for entry in journal.read():
        decision = decider.step(entry.at, entry.event)
        if decision != entry.decision and _written_actions(decision) != _written_actions(entry.decision):
            raise RebuildError(entry.seq)
        yield entry


def _written_actions(decision: Decision) -> bytes:
    """Return a decision's actions without texts, causes and durations, which may differ between versions of holdfast.

    The result is encoded as bytes. Two values that are NaN then compare as equal.
    """
    actions = [msgspec.to_builtins(action) for action in decision.actions if not isinstance(action, Say)]
    told = [{name: value for name, value in one.items() if not _is_manner(name)} for one in actions]
    return msgspec.msgpack.encode(told)


def _is_manner(field: str) -> bool:
    return field in ("reason", "cause") or field.endswith("_s")
