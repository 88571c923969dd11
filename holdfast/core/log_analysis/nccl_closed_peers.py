"""Gives little weight to NCCL's general errors that a line "Last error" explains: a peer closed the connection."""

import re
from collections.abc import Sequence
from itertools import pairwise

from holdfast.core.log_analysis.catalog_hits import CatalogHit
from holdfast.core.log_analysis.line_prefixes import LogLine

_WRAPPER = re.compile(
    r"ncclInternalError|ncclSystemError|unhandled system error|internal error, NCCL|NCCL error in: |DistBackendError"
)
_LAST = re.compile(r"\bLast error:?\s*(?P<words>.*)$")
_GONE = re.compile(
    r"[Cc]onnection (?:closed|reset) by (?:remote )?peer|failed : Broken pipe|[Rr]emote process (?:has )?exited|"
    r"ncclRemoteError"
)
_NEAR = 12  # lines from the wrapper to the last error, where ranks write into one another
_MUTE = 1.0


def discount_wrappers(hits: Sequence[CatalogHit], lines: Sequence[LogLine]) -> None:
    """Give little weight to NCCL's general errors if "Last error" near them says that a peer closed the connection."""
    told = [said for said, after in pairwise([*lines, LogLine(text="", raw="")]) if _tells_of_peer(said, after)]
    for hit in hits:
        if hit.row.role == "cause" and _WRAPPER.search(hit.said.text) and any(_is_near(hit, said) for said in told):
            hit.weight = min(hit.weight, _MUTE)


def _tells_of_peer(said: LogLine, after: LogLine) -> bool:
    """Return whether this is NCCL's line "Last error" and it, or the line `after`, names a closed connection."""
    found = _LAST.search(said.text)
    return found is not None and _GONE.search(found["words"] or after.text) is not None


def _is_near(hit: CatalogHit, said: LogLine) -> bool:
    same = (hit.said.source, hit.said.rank) == (said.source, said.rank)
    return same and 0 <= said.index - hit.said.index <= _NEAR
