"""Which nodes a job that stands takes before their checks have ended, and when."""

from collections.abc import Mapping

import msgspec

# A check takes seconds. One that takes a minute waits for a processor, or for a device that hangs. On a bad node the
# launch fails within minutes, and the job stands again. On a sound one each further second of waiting is in vain.
UNCHECKED_S = 60.0


class UncheckedNodes(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[str, ...]
    at: float  # when they are taken


def choose_unchecked(begun: Mapping[str, float], lacking: int, stood_since: float) -> UncheckedNodes | None:
    """Return the nodes that get ranks although their checks have not ended; None if nodes that are being checked cannot
    make the job go on.

    `begun` has the nodes that are being checked, and since when. `lacking` is how many more nodes the job needs, and
    `stood_since` is when it began to wait for them. As few nodes as needed are taken, those checked longest first.
    """
    if not 0 < lacking <= len(begun):
        return None
    nodes = sorted(begun, key=lambda node: (begun[node], node))[:lacking]
    return UncheckedNodes(nodes=tuple(nodes), at=max(stood_since, begun[nodes[-1]]) + UNCHECKED_S)
