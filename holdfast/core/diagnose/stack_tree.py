"""Merges the stacks of many processes into one tree that shows which ranks are in which frame."""

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.core.diagnose.stack_folding import Folded, fold_stack, main_frames
from holdfast.model.rank_traces import Process


class StackBranch(msgspec.Struct, kw_only=True):
    """One frame, the ranks that are in it or further down, and the frames called from it."""

    frame: str
    ranks: list[int] = []
    here: list[int] = []  # whose innermost frame it is
    below: dict[str, "StackBranch"] = {}


def grow_tree(processes: Iterable[Process]) -> StackBranch:
    """Build the tree from the main threads of these processes. A rank with two processes is counted twice."""
    return merge_stacks(((process.rank,), fold_stack(main_frames(process))) for process in processes)


def merge_stacks(stacks: Iterable[tuple[Sequence[int], Folded]]) -> StackBranch:
    """Build the tree from stacks, each with the ranks that have it. An empty stack is left out."""
    root = StackBranch(frame="")
    for ranks, folded in stacks:
        if not folded:
            continue
        branch = root
        branch.ranks.extend(ranks)
        for frame in folded:
            branch = branch.below.setdefault(frame, StackBranch(frame=frame))
            branch.ranks.extend(ranks)
        branch.here.extend(ranks)
    return root


def sort_branches(branch: StackBranch) -> list[StackBranch]:
    """Return the branches directly below this one, largest first."""
    return sorted(branch.below.values(), key=lambda one: (-len(one.ranks), one.frame))


def list_branches(root: StackBranch) -> list[tuple[list[str], StackBranch]]:
    """Return the branches below `root`, largest first, each with the frames that all its ranks share."""
    found = []
    for branch in sort_branches(root):
        way = [branch.frame]
        while len(branch.below) == 1 and not branch.here:
            (branch,) = branch.below.values()
            way.append(branch.frame)
        found.append((way, branch))
    return found
