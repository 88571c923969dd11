"""What a node has for snapshots: read from the kernel, for `holdfast.core.memory` to judge."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.checkpoint.arena import arena_bytes
from holdfast.core.memory import Ask, Grant, Room, grant
from holdfast.wire.keeping import Want
from holdfast.wire.spec import NodeSpec

_ROOT = Path("/")
_COPIES = 2  # slots that a node keeps of a share it holds for another
_MEMORY = "/memfd:holdfast-"  # how the kernel calls what a holder keeps
_NO_LIMIT = 1 << 60  # cgroup v1 says so with a number near 2**63


class Budget:
    """What the ranks of a node were given; asked by the keeper before it has memory made."""

    def __init__(self, room: Callable[[], Room], *, backed: bool = False) -> None:
        self.backed = backed  # whether this node keeps copies for another, about as large as its own ranks' shares
        self.parity = False  # and if so, two of them laid over one another, half of each
        self._room = room
        self._given: dict[int, int] = {}

    def grant(self, want: Want) -> Grant:
        """How many slots this rank gets, from now on counted as given; none: refused, for the reason that is told."""
        ask = self._ask(want, want.slots)
        given = grant(ask, self._given, self._room())
        if given.slots:
            self._given[want.rank] = ask.need_bytes(given.slots)
        return given

    def recall(self, want: Want, slots: int) -> None:
        """Given before this agent was started, or kept as it was."""
        self._given[want.rank] = self._ask(want, slots).need_bytes(slots)

    def _ask(self, want: Want, slots: int) -> Ask:
        share_bytes = sum(end - start for start, end in want.share)
        kept_bytes = -(-share_bytes // 2) if self.parity else share_bytes
        copies_bytes = arena_bytes(kept_bytes, _COPIES) if self.backed else 0
        return Ask(rank=want.rank, slot_bytes=arena_bytes(want.image_bytes, 1), slots=slots, backup_bytes=copies_bytes)


def room(node_dir: Path, node: NodeSpec, root: Path = _ROOT) -> Room:
    """The memory of this node. What snapshots hold already is counted as free: it is theirs whatever is asked next."""
    held_bytes = sum(_held_bytes(pid, root) for pid in _holders(node_dir.parent))
    return Room(
        available_bytes=available_bytes(root) + held_bytes,
        cap=node.settings.snapshot.memory,
        nproc=node.nproc,
        nodes=node.host_nodes,
    )


def available_bytes(root: Path = _ROOT) -> int:
    """What can be taken without harm: of the machine, or of the tightest cgroup that this process is in."""
    meminfo = _numbers(root / "proc/meminfo")
    return max(0, min([1024 * meminfo["MemAvailable:"], *(left for left, _ in _cgroups(root))]))


def used_part(root: Path = _ROOT) -> float:
    """Of the machine's memory, or of what a cgroup above us may take: where there is least left of it."""
    meminfo = _numbers(root / "proc/meminfo")
    rooms = [(meminfo["MemAvailable:"], meminfo["MemTotal:"]), *_cgroups(root)]
    return max(1.0 - left / most for left, most in rooms if most > 0)


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """What each cgroup above us has left, and its limit. Cache that nobody uses is given back when memory is wanted."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _folders(root, "sys/fs/cgroup", path):
                limits = (_limit(folder / name) for name in ("memory.max", "memory.high"))
                yield from _left(folder, min(limits), "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _folders(root, "sys/fs/cgroup/memory", path):
                limit = _limit(folder / "memory.limit_in_bytes")
                yield from _left(folder, limit, "memory.usage_in_bytes", "total_inactive_file")


def _folders(root: Path, mount: str, path: str) -> Iterator[Path]:
    """The cgroup and all above it; within a container part of the path lies outside, where nothing is to be seen."""
    top = root / mount
    folder = top / path.lstrip("/")
    yield folder
    while folder != top and top in folder.parents:
        folder = folder.parent
        yield folder


def _left(folder: Path, limit: int, usage: str, cache: str) -> Iterator[tuple[int, int]]:
    if limit < _NO_LIMIT:
        try:
            used = int((folder / usage).read_text())
            yield limit - used + _numbers(folder / "memory.stat").get(cache, 0), limit
        except (OSError, ValueError):
            return  # the group was removed meanwhile, or does not count


def _limit(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max", or no such controller here
        return _NO_LIMIT


def _numbers(path: Path) -> dict[str, int]:
    fields = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdecimal()}


def _holders(nodes: Path) -> Iterator[int]:
    """Of all nodes of this run on this host."""
    for path in nodes.glob("*/holder.pid"):
        try:
            yield int(path.read_text())
        except (OSError, ValueError):
            continue  # it has just left


def _held_bytes(pid: int, root: Path) -> int:
    """What a holder's memory takes now; of pages that were never touched there is nothing to count."""
    folder, found = root / "proc" / str(pid) / "fd", 0
    try:
        for name in os.listdir(folder):
            if os.readlink(folder / name).startswith(_MEMORY):
                found += 512 * os.stat(folder / name).st_blocks
    except OSError:
        pass  # it ended meanwhile, and its memory is free again
    return found
