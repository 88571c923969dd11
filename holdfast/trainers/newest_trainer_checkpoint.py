"""Finds the newest whole checkpoint that a trainer has written itself, since a killed trainer may leave half of one."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from holdfast.client.checkpointing.rank_collectives import RankWorld
from holdfast.core.terminal_sanitizer import plain_line


class OwnCheckpoint(NamedTuple):
    """A checkpoint that a trainer has written by itself."""

    step: int
    path: str


def find_own_checkpoint(folder: Path, name: str, find_fault: Callable[[Path], str]) -> OwnCheckpoint | None:
    """Return the newest whole checkpoint that every node sees, or None. All ranks must call this.

    `name` is a pattern for checkpoints' names; its first group is the checkpoint's number. `find_fault` returns why a
    checkpoint is not whole, or "". It reads every byte, so checkpoints are tested in turn, newest first, until one is
    whole.
    """
    return find_first_whole(lambda: list_newest_first(folder, name), find_fault)


def find_first_whole(
    list_checkpoints: Callable[[], list[OwnCheckpoint]],
    find_fault: Callable[[Path], str],
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> OwnCheckpoint | None:
    """Return the newest checkpoint, of those that one rank of each node lists, that all nodes find whole, or None.
    `left_out` has the faults of others, by their paths, to be told beside those that are found. All ranks must call
    this."""
    world = RankWorld()
    looks = os.environ.get("LOCAL_RANK", "0") == "0"  # the other ranks of a node would see the same
    listed = world.gather_all((looks, list_checkpoints() if looks else []), tuple[bool, list[OwnCheckpoint]])
    seen = [set(all_of_node) for has_looked, all_of_node in listed if has_looked]
    faulty = dict(left_out)
    whole = None
    for one in sorted(set.union(*seen), reverse=True):
        faults = ["not every node sees it"]
        if all(one in all_of_node for all_of_node in seen):
            faults = [fault for fault in world.gather_all(find_fault(Path(one.path)) if looks else "", str) if fault]
        if not faults:
            whole = one
            break
        faulty[one.path] = faults[0]
    if world.rank == 0:
        say_left_out(faulty, whole.path if whole else "")
    return whole


def list_newest_first(folder: Path, name: str) -> list[OwnCheckpoint]:
    """Return all checkpoints in the folder, whole or not, ordered from the highest number down."""
    named = [(re.fullmatch(name, path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((OwnCheckpoint(int(found[1]), str(path)) for found, path in named if found), reverse=True)


def say_left_out(faults: Mapping[str, str], used: str) -> None:
    """Say of each checkpoint that is not whole why it is left out, and which one is used in its place, if any."""
    instead = f"{plain_line(used)}, the newest whole one, is used" if used else "none is whole"
    for path, fault in faults.items():
        print(f"holdfast: {plain_line(path)} is left out: {plain_line(fault)}; {instead}", file=sys.stderr, flush=True)
