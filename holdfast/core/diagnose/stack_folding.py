"""Makes stacks comparable: removes meaningless differences between ranks, and groups ranks with equal stacks."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from holdfast.model.rank_traces import Frame, Process

ALIKE = 0.8  # stacks that share this much of their way, and wait alike, count as one
_KNOWN = 32  # places that a rare stack is compared with
_RARE = 512  # rarer ones are compared with none
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|(?<![A-Za-z_])\d{3,}")
_PACKAGES = re.compile(r".*/(?:(?:site|dist)-packages|python3\.\d+)/")
# Where a thread waits for other ranks, as the innermost Python frame shows it.
_WAITING = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_BETWEEN = ("send", "isend", "recv", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")

Folded = tuple[str, ...]  # "function (file)", outermost first


class StackCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks whose main threads are at the same place in the code."""

    ranks: tuple[int, ...]
    frames: Folded  # of the most of them
    waits: bool = False  # for other ranks, in torch.distributed


def fold_stack(frames: Iterable[Frame]) -> Folded:
    """Return a stack as text, without line numbers, addresses and the folder where packages are installed."""
    return tuple([_frame_text(f.function, f.file) for f in frames])  # a list first is faster, and there may be many


@lru_cache(1 << 16)
def _frame_text(function: str, file: str) -> str:
    return f"{_NUMBERS.sub('N', function)} ({shorten_path(file)})"


def shorten_path(file: str) -> str:
    """Return a path that is the same on every node: the path inside its package, or the file and its folder."""
    inside = _PACKAGES.sub("", file)
    return inside if inside != file or not file.startswith("/") else "/".join(file.rsplit("/", 2)[-2:])


def main_frames(process: Process) -> tuple[Frame, ...]:
    """Return the frames of a process's main thread; empty if it has none."""
    main = next((thread for thread in process.threads if thread.main), None)
    return main.frames if main else ()


def is_waiting(folded: Folded) -> bool:
    """Return whether the innermost Python frame belongs to a torch function that waits for other ranks."""
    python = next((frame for frame in reversed(folded) if frame.endswith((".py)", ">)"))), "")
    return any(file in python for file in _WAITING)


def is_waiting_for_one(folded: Folded) -> bool:
    """Return whether a stack waits in a send or receive between two ranks, which has no sequence number."""
    return is_waiting(folded) and any(
        frame.startswith(tuple(f"{name} (" for name in _BETWEEN)) for frame in folded[-3:]
    )


def cluster_ranks(mains: Sequence[Process]) -> tuple[StackCluster, ...]:
    """Group ranks by where their main threads are, largest group first; ranks without frames are left out."""
    by_raw: dict[tuple[Frame, ...], list[int]] = {}
    for process in mains:
        if frames := main_frames(process):
            by_raw.setdefault(frames, []).append(process.rank)
    exact: dict[Folded, list[int]] = {}
    for raw, ranks in by_raw.items():
        exact.setdefault(fold_stack(raw), []).extend(ranks)
    merged: list[tuple[Folded, list[int]]] = []
    for number, (folded, ranks) in enumerate(sorted(exact.items(), key=lambda item: (-len(item[1]), min(item[1])))):
        known = merged[:_KNOWN] if number < _RARE else ()
        like = next((members for place, members in known if is_same_place(place, folded)), None)
        if like is None:
            merged.append((folded, ranks))
        else:
            like.extend(ranks)
    found = [StackCluster(ranks=tuple(sorted(r)), frames=f, waits=is_waiting(f)) for f, r in merged]
    return tuple(sorted(found, key=lambda c: (-len(c.ranks), c.ranks[0])))


def is_same_place(one: Folded, other: Folded) -> bool:
    """Return whether two stacks, taken at different times, may be at the same place. They are if most of the outer
    frames, or most of all frames, agree. A stack that waits for other ranks never agrees with a stack that does not."""
    if is_waiting(one) != is_waiting(other) or (is_waiting(one) and one[-1] != other[-1]):
        return False
    longest = max(len(one), len(other))
    common = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if common >= ALIKE * longest:
        return True
    here, there = set(one), set(other)
    return len(here & there) >= ALIKE * len(here | there)
