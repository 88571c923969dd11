"""The plan of a launch: the state that its ranks restore, noted before any node hears of it, so that the next
controller tells the same."""

import contextlib

import msgspec

from holdfast.core.snapshots.lineage import Line
from holdfast.decoding import make_decoder
from holdfast.model.action import Launch
from holdfast.model.restore_sources import LaunchOrigin, Restore
from holdfast.model.state_doubt import Doubt


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a launch restores, and the nodes, generation and release that it is for."""

    id: int
    restore: Restore
    generation: int = 0
    nodes: tuple[str, ...] = ()  # that are told
    release: int = 0
    line: tuple[LaunchOrigin, ...] = ()  # this launch and those before it
    left: tuple[Doubt, ...] = ()  # which states on disks from before the oldest of these are of no use
    stored: int = -1  # newest checkpoint on storage, as far as nodes have reported


_DECODER = make_decoder(msgspec.json.Decoder(LaunchPlan))


def read_plan(note: bytes) -> LaunchPlan | None:
    """Return the plan of a note; None if there is none, or if it is damaged: nodes are waited for instead."""
    with contextlib.suppress(msgspec.DecodeError):
        return _DECODER(note) if note else None
    return None


def known_lines(launch: Launch, kept: LaunchPlan | None) -> tuple[Line, tuple[Doubt, ...]]:
    """Return the launches before this one, and doubts about states on disks. Without a recent `kept`, doubt all."""
    if kept and kept.generation >= launch.generation - 1:
        return kept.line, kept.left
    return (), (Doubt(generation=launch.generation - 1, not_after=-1),)
