"""Merges the stacks of many processes into one tree that shows which ranks are in which frame."""

from collections.abc import Iterable

import msgspec

from holdfast.core.diagnose.stack_folding import fold_stack, main_frames
from holdfast.model.rank_traces import Process


class StackBranch(msgspec.Struct, kw_only=True):
    """One frame, the ranks that are in it or further down, and the frames called from it."""

    frame: str
    ranks: list[int] = []
    here: list[int] = []  # whose innermost frame it is
    below: dict[str, "StackBranch"] = {}


def grow_tree(processes: Iterable[Process]) -> StackBranch:
    """Build the tree from the main threads of these processes. A rank with two processes is counted twice."""
    root = StackBranch(frame="")
    for process in processes:
        folded = fold_stack(main_frames(process))
        if not folded:
            continue
        branch = root
        branch.ranks.append(process.rank)
        for frame in folded:
            branch = branch.below.setdefault(frame, StackBranch(frame=frame))
            branch.ranks.append(process.rank)
        branch.here.append(process.rank)
    return root


def list_branches(root: StackBranch) -> list[tuple[list[str], StackBranch]]:
    """Return the branches below `root`, largest first, each with the frames that all its ranks share."""
    found = []
    for branch in sorted(root.below.values(), key=lambda b: (-len(b.ranks), b.frame)):
        way = [branch.frame]
        while len(branch.below) == 1 and not branch.here:
            (branch,) = branch.below.values()
            way.append(branch.frame)
        found.append((way, branch))
    return found
