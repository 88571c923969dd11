"""How much of a node's memory snapshots may use, and how many snapshot slots each rank gets."""

import re
from collections.abc import Mapping

import msgspec

LEAST_SLOTS = 2  # with one, a snapshot would be overwritten before the next is whole
_CAP = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]?(?:i?B)?)", re.IGNORECASE)
_POWERS = " KMGT"


class SnapshotLimits(msgspec.Struct, frozen=True, kw_only=True):
    memory: str = "80%"  # what snapshots may take of a node: a size, or a part of the memory that is available


class MemoryCap(msgspec.Struct, frozen=True):
    """The user's limit: a number of bytes, or a fraction of the available memory."""

    bytes: int = 0
    fraction: float = 1.0  # counts where there are no bytes

    def allowed_bytes(self, available_bytes: int) -> int:
        return min(self.bytes, available_bytes) if self.bytes else int(self.fraction * available_bytes)


class MemoryRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A node's memory, counted as if it held no snapshots."""

    available_bytes: int  # of the host: what could be taken now, and what the snapshots of this run hold already
    cap: str  # as in SnapshotLimits
    nproc: int  # ranks on the node
    nodes: int = 1  # of this run that share the host

    @property
    def part_bytes(self) -> int:
        """Return this node's equal part of the host's available bytes. Several nodes of the run may share the host."""
        return self.available_bytes // self.nodes

    @property
    def bytes(self) -> int:
        return parse_cap(self.cap).allowed_bytes(self.part_bytes)


class MemoryRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot memory that one rank asks for on its node."""

    rank: int
    slot_bytes: int  # of one slot, its header included
    slots: int  # at most; fewer are given where memory is short
    backup_bytes: int = 0  # of the copies that its node keeps for a rank of another, all slots of them

    def need_bytes(self, slots: int) -> int:
        return slots * self.slot_bytes + self.backup_bytes


class MemoryGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request: the number of slots (0: refused), and the reason if they are fewer than asked."""

    slots: int
    why: str = ""
    need_bytes: int = 0  # of the whole node, with these slots
    room_bytes: int = 0


_MOST = 1e18  # of any unit


def parse_cap(text: str) -> MemoryCap:
    """Parse a cap such as 50% or 64G. The units K to T are powers of 1024, and the units KB to TB are powers of 1000.
    Raise ValueError if the text is no cap."""
    found = _CAP.fullmatch(text.strip())
    number, unit = (float(found[1]), found[2].upper()) if found else (0.0, "")
    if found and unit == "%" and 0 < number <= 100:
        return MemoryCap(fraction=number / 100)
    size = int(number * _unit_bytes(unit)) if unit != "%" and number < _MOST else 0
    if size < 1:
        raise ValueError(f"'{text}' is no share of a node's memory: give a size as in 64G, or a part as in 50%")
    return MemoryCap(bytes=size)


def _unit_bytes(unit: str) -> int:
    step = 1000 if re.fullmatch("[KMGT]B", unit) else 1024
    return int(step ** _POWERS.index(unit[0])) if unit[:1] in [*_POWERS[1:]] else 1


def grant_memory(ask: MemoryRequest, made: Mapping[int, int], room: MemoryRoom) -> MemoryGrant:
    """Return how many slots the asking rank gets, such that every rank of its node can have as many.

    `made` gives, by rank, the bytes already granted on this node, including copies for others. The asking rank's bytes
    do not count, because they are replaced. A rank that has not asked yet is assumed to need as much as the other ranks
    do on average. So a refusal comes before training starts.
    """
    others = {rank: size for rank, size in made.items() if rank != ask.rank}
    need, room_bytes = 0, room.bytes
    for slots in range(max(ask.slots, LEAST_SLOTS), LEAST_SLOTS - 1, -1):
        need = _needed_bytes(ask, slots, others, room.nproc)
        if need <= room_bytes:
            why = _fewer_reason(ask, slots, others, room) if slots < ask.slots else ""
            return MemoryGrant(slots=slots, why=why, need_bytes=need, room_bytes=room_bytes)
    return MemoryGrant(slots=0, why=_refusal_reason(ask, need, others, room), need_bytes=need, room_bytes=room_bytes)


def _needed_bytes(ask: MemoryRequest, slots: int, others: Mapping[int, int], nproc: int) -> int:
    """Return the bytes that all ranks of the node need together."""
    own = ask.need_bytes(slots)
    known = own + sum(others.values())
    unknown = max(0, nproc - len(others) - 1)
    return known + unknown * -(-known // (len(others) + 1))


def _fewer_reason(ask: MemoryRequest, slots: int, others: Mapping[int, int], room: MemoryRoom) -> str:
    need = _needed_bytes(ask, ask.slots, others, room.nproc)
    return (
        f"rank {ask.rank} gets {slots} slots of {format_bytes(ask.slot_bytes)} for its snapshots "
        f"instead of {ask.slots}: "
        f"{ask.slots} for each of {_count_ranks(room.nproc)} would take {format_bytes(need)}, "
        f"and {_describe_room(room)}"
    )


def _refusal_reason(ask: MemoryRequest, need: int, others: Mapping[int, int], room: MemoryRoom) -> str:
    what = f"{LEAST_SLOTS} slots of {format_bytes(ask.slot_bytes)}"
    copies = f" and {format_bytes(ask.backup_bytes)} of copies for another node" if ask.backup_bytes else ""
    given = f" ({format_bytes(sum(others.values()))} of it given already)" if others else ""
    return (
        f"snapshots do not fit into the memory of this node: "
        f"{what}{copies} for each of {_count_ranks(room.nproc)} take "
        f"{format_bytes(need)}{given}, and {_describe_room(room)}; {_suggest_fix(need, room)}"
    )


def _describe_room(room: MemoryRoom) -> str:
    """Return in words how much memory may be used, and where that number comes from."""
    shared = f", one part in {room.nodes} of the host's {format_bytes(room.available_bytes)}" if room.nodes > 1 else ""
    available = f"{format_bytes(room.part_bytes)} are available{shared}"
    return f"{format_bytes(room.bytes)} may be used (--snapshot-memory {room.cap}; {available})"


def _suggest_fix(need: int, room: MemoryRoom) -> str:
    less = "put fewer ranks on a node, shard the state over more of them, or do without holdfast.Checkpointer"
    if need > room.part_bytes:
        return less
    return f"allow more with --snapshot-memory {-(-need >> 20) or 1}M, or {less}"


def _count_ranks(count: int) -> str:
    return f"{count} ranks" if count != 1 else "1 rank"


def format_bytes(count: int) -> str:
    """Return a number of bytes as a person reads it."""
    value, unit = float(count), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.1f} {unit}" if unit != "bytes" else f"{count} bytes"
