"""Orders kernel lines about GPUs: a fault of a program, a link or a GPU outweighs the errors that follow from it."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from holdfast.core.log_analysis.catalog_hits import CatalogHit

_XID = re.compile(r"\bXid \(PCI:(?P<gpu>[0-9a-fA-F:.]{4,16})\): (?P<number>\d{1,3})\b")
_BOOT = re.compile(r"\[ {0,5}(\d+\.\d{6})\]")
_OF_PROGRAMS = frozenset({13, 31})  # what a kernel of the program did wrong
# What the driver says while it clears up after a program: a stopped channel, a reset, a firmware that waits for it.
_FOLLOW = frozenset({32, 43, 45, 61, 62, 69, 94, 109, 119, 120, 143, 154})
_SOON_S = 60.0
_SOON_LINES = 40  # where no clock tells
_LINK, _BUS, _LOST = "nvlink_nvswitch_error", "host_hw_kernel_fault", "gpu_lost_bus"
_BUS_ERROR = re.compile(r"\bAER\b|\bPCIe Bus Error\b|\bDPC\b")
_BUS_SOON_S = 10.0
_FOLLOWED = 4.0  # weight that is left: less than that of a program's fault


class _Xid(msgspec.Struct, frozen=True):
    hit: CatalogHit
    gpu: str
    number: int
    at: float | None

    def is_soon_after(self, first: "_Xid") -> bool:
        """Return whether this Xid came from the same log as `first`, shortly after it."""
        if self.hit.said.source != first.hit.said.source:
            return False
        if self.at is not None and first.at is not None:
            return 0 <= self.at - first.at <= _SOON_S and self.hit.said.index > first.hit.said.index
        return 0 < self.hit.said.index - first.hit.said.index <= _SOON_LINES


def discount_followers(hits: Sequence[CatalogHit]) -> None:
    """Reduce the weight of GPU messages that follow from a program's fault, a failed GPU link or a lost GPU."""
    xids = sorted(_read_xids(hits), key=lambda xid: (xid.hit.said.source, xid.hit.said.index))
    faults: dict[str, _Xid] = {}  # by GPU: the program's newest
    for xid in xids:
        fault = faults.get(xid.gpu)
        if xid.number in _OF_PROGRAMS:
            faults[xid.gpu] = xid
        elif xid.number in _FOLLOW and fault is not None and xid.is_soon_after(fault):
            xid.hit.weight = min(xid.hit.weight, _FOLLOWED)
    seconds: defaultdict[float | None, list[_Xid]] = defaultdict(list)
    for xid in xids:
        seconds[xid.at].append(xid)
    for second in {hit.said.at for hit in hits if hit.klass == _LINK and hit.said.kernel} - {None}:
        _blame_link(seconds[second])
    _blame_gpu(
        [hit for hit in hits if hit.klass == _BUS and hit.said.kernel and _BUS_ERROR.search(hit.said.text)], xids
    )


def _blame_gpu(bus: list[CatalogHit], xids: list[_Xid]) -> None:
    """Reduce the weight of a bus error if a GPU was lost within seconds of it, because the loss explains the error."""
    for hit in bus:
        at = _read_clock(hit)
        for xid in xids:
            near = at is not None and xid.at is not None and abs(xid.at - at) <= _BUS_SOON_S
            if near and xid.hit.klass == _LOST and xid.hit.said.source == hit.said.source:
                hit.weight = min(hit.weight, _FOLLOWED)


def _blame_link(xids: list[_Xid]) -> None:
    """Reduce the weight of all `xids` but link errors, if they come from several GPUs in the second of a link
    failure."""
    if len({xid.gpu for xid in xids}) < 2:
        return
    for xid in xids:
        if xid.hit.klass != _LINK:
            xid.hit.weight = min(xid.hit.weight, _FOLLOWED)


def _read_xids(hits: Sequence[CatalogHit]) -> Iterator[_Xid]:
    for hit in hits:
        if hit.row.role == "cause" and (found := _XID.search(hit.said.text)):
            yield _Xid(hit, found["gpu"].lower(), int(found["number"]), _read_clock(hit))


def _read_clock(hit: CatalogHit) -> float | None:
    """Return the time from the line's own prefix, else the seconds since the machine started, else None."""
    if hit.said.own_clock and hit.said.at is not None:
        return hit.said.at
    boot = _BOOT.search(hit.said.raw)
    return float(boot[1]) if boot else None
