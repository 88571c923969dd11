"""Measures the memory that a node has for snapshots; `holdfast.core.snapshots.memory_grant` decides who gets it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.checkpoint.arena_header import arena_bytes
from holdfast.core.snapshots.memory_grant import MemoryGrant, MemoryRequest, MemoryRoom, grant_memory
from holdfast.model.copy_aim import Aim
from holdfast.wire.rank_keeper_messages import ArenaRequest
from holdfast.wire.run_and_node_specs import NodeSpec

_ROOT = Path("/")
_SLOTS = 2  # slots that a node keeps of a share it holds for another
_MEMORY = "/memfd:holdfast-"  # how the kernel calls what a holder keeps
_NO_LIMIT = 1 << 60  # cgroup v1 says so with a number near 2**63


class SnapshotBudget:
    """Counts the memory granted to a node's ranks; the keeper asks it before making an arena."""

    def __init__(self, room: Callable[[], MemoryRoom], *, copies: int = 0) -> None:
        self._copies = copies  # that this node keeps for others, each about as large as its own ranks' shares
        self._parity = False  # and if so, two of them laid over one another, half of each
        self._room = room
        self._given: dict[int, int] = {}

    def on_aim(self, aim: Aim) -> None:
        """Count copies for others: as many as others keep of this node's states."""
        self._copies, self._parity = sum(map(bool, (aim.peer, aim.second))), bool(aim.halves)

    def grant_slots(self, want: ArenaRequest) -> MemoryGrant:
        """Grant slots to a rank and count them as given. A grant of 0 slots is a refusal, with the reason in `why`."""
        ask = self._memory_ask(want, want.slots)
        given = grant_memory(ask, self._given, self._room())
        if given.slots:
            self._given[want.rank] = ask.need_bytes(given.slots)
        return given

    def record_grant(self, want: ArenaRequest, slots: int) -> None:
        """Count memory that a rank already has: an earlier agent granted it, or the rank keeps its arena."""
        self._given[want.rank] = self._memory_ask(want, slots).need_bytes(slots)

    def _memory_ask(self, want: ArenaRequest, slots: int) -> MemoryRequest:
        share_bytes = sum(end - start for start, end in want.share)
        kept_bytes = -(-share_bytes // 2) if self._parity else share_bytes
        copies_bytes = self._copies * arena_bytes(kept_bytes, _SLOTS)
        return MemoryRequest(
            rank=want.rank, slot_bytes=arena_bytes(want.image_bytes, 1), slots=slots, backup_bytes=copies_bytes
        )


def measure_room(node_dir: Path, node: NodeSpec, root: Path = _ROOT) -> MemoryRoom:
    """Measure this node's memory. Memory that snapshots hold counts as available, because new arenas will reuse it."""
    held_bytes = sum(_held_bytes(pid, root) for pid in _holder_pids(node_dir.parent))
    return MemoryRoom(
        available_bytes=available_bytes(root) + held_bytes,
        cap=node.settings.snapshot.memory,
        nproc=node.nproc,
        nodes=node.host_nodes,
    )


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of memory that can be taken without harm: what the machine and each of our cgroups has left."""
    meminfo = _read_fields(root / "proc/meminfo")
    return max(0, min([1024 * meminfo["MemAvailable:"], *(left for left, _ in _cgroups_left(root))]))


def used_part(root: Path = _ROOT) -> float:
    """Return the used fraction of memory, the largest among the machine and the cgroups that contain this process."""
    meminfo = _read_fields(root / "proc/meminfo")
    rooms = [(meminfo["MemAvailable:"], meminfo["MemTotal:"]), *_cgroups_left(root)]
    return max(1.0 - left / most for left, most in rooms if most > 0)


def _cgroups_left(root: Path) -> Iterator[tuple[int, int]]:
    """Yield free memory and limit of each cgroup that contains this process. Inactive file cache counts as free."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _cgroup_folders(root, "sys/fs/cgroup", path):
                limits = (_read_limit(folder / name) for name in ("memory.max", "memory.high"))
                yield from _cgroup_left(folder, min(limits), "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _cgroup_folders(root, "sys/fs/cgroup/memory", path):
                limit = _read_limit(folder / "memory.limit_in_bytes")
                yield from _cgroup_left(folder, limit, "memory.usage_in_bytes", "total_inactive_file")


def _cgroup_folders(root: Path, mount: str, path: str) -> Iterator[Path]:
    """Yield the folders of the cgroup and its ancestors. In a container, some of these folders do not exist."""
    top = root / mount
    folder = top / path.lstrip("/")
    yield folder
    while folder != top and top in folder.parents:
        folder = folder.parent
        yield folder


def _cgroup_left(folder: Path, limit: int, usage: str, cache: str) -> Iterator[tuple[int, int]]:
    if limit < _NO_LIMIT:
        try:
            used = int((folder / usage).read_text())
            yield limit - used + _read_fields(folder / "memory.stat").get(cache, 0), limit
        except (OSError, ValueError):
            return  # the group was removed meanwhile, or does not count


def _read_limit(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max", or no such controller here
        return _NO_LIMIT


def _read_fields(path: Path) -> dict[str, int]:
    fields = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdecimal()}


def _holder_pids(nodes: Path) -> Iterator[int]:
    """Yield the pids of the holders of all nodes of this run on this host."""
    for path in nodes.glob("*/holder.pid"):
        try:
            yield int(path.read_text())
        except (OSError, ValueError):
            continue  # it has just left


def _held_bytes(pid: int, root: Path) -> int:
    """Return the bytes that a holder's arenas take now; pages that were never touched do not count."""
    folder, found = root / "proc" / str(pid) / "fd", 0
    try:
        for name in os.listdir(folder):
            if os.readlink(folder / name).startswith(_MEMORY):
                found += 512 * os.stat(folder / name).st_blocks
    except OSError:
        pass  # it ended meanwhile, and its memory is free again
    return found
