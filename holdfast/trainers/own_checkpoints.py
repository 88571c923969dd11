"""Finds the newest whole checkpoint that a trainer has written itself; a kill may have left half of one."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.client.checkpointing.rank_collectives import RankWorld


class OwnCheckpoint(NamedTuple):
    """A checkpoint that a trainer has written by itself."""

    step: int
    path: str


def find_own_checkpoint(folder: Path, name: str, find_fault: Callable[[Path], str]) -> OwnCheckpoint | None:
    """Return the newest whole checkpoint that every node sees; a collective.

    `name` is a pattern for checkpoints' names, its first group the number. `find_fault` returns why a checkpoint is not
    whole.
    """
    world, found = RankWorld(), list[OwnCheckpoint]()
    looks = os.environ.get("LOCAL_RANK", "0") == "0"  # the other ranks of a node would see the same
    for one in list_newest_first(folder, name) if looks else ():
        if not (fault := find_fault(Path(one.path))):
            found.append(one)
        elif world.rank == 0:
            say_left_out(one.path, fault)
    told = [set(all_of_node) for all_of_node in world.gather_all(found if looks else None) if all_of_node is not None]
    return max(set.intersection(*told), default=None)


def list_newest_first(folder: Path, name: str) -> list[OwnCheckpoint]:
    """Return all checkpoints, whole or not, those with the highest numbers first."""
    named = [(re.fullmatch(name, path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((OwnCheckpoint(int(found[1]), str(path)) for found, path in named if found), reverse=True)


def say_left_out(path: str, fault: str) -> None:
    print(f"holdfast: {path} is left out: {fault}", file=sys.stderr, flush=True)
