"""Decides how many looks at a rank's network to order, and how far apart: many at first, and then a few now and then.

A look that finds nothing open costs the rank's process some ten microseconds on gloo, another one below a millisecond.
A first profile takes some steps. Later looks only keep it true, and take far less than a thousandth of the time.
"""

import msgspec

from holdfast.core.snapshots.step_network_profile import PARTS, SAMPLES

_LATER, _LATER_S = 32, 30.0  # so many looks in so many seconds once there is a profile
_GIVEN_UP_S = 60.0  # looks that have not come by then, and their usual time, are not waited for
_LEAST_STEPS = 2  # that a rank has made before its pace is known


class LookOrder(msgspec.Struct, frozen=True):
    count: int
    spacing_s: float


class LookOrders:
    """The orders to one rank in one generation."""

    def __init__(self) -> None:
        self._ordered_at = self._due_at = 0.0
        self._left = 0  # looks that were ordered and have not come

    def note_looks(self, count: int) -> None:
        self._left = max(0, self._left - count)

    def next_order(self, now: float, known: int, steps: int, made_s: float) -> LookOrder | None:
        """Return the looks to order now, for a profile made from `known` looks. The rank has made so many steps, in so
        many seconds."""
        if steps < _LEAST_STEPS or made_s <= 0:
            return None
        if self._left and now < self._due_at:
            return None
        if known >= SAMPLES and now < self._ordered_at + _LATER_S:
            return None
        count, spacing_s = _LATER if known >= SAMPLES else SAMPLES, made_s / steps / PARTS
        self._left, self._ordered_at = count, now
        self._due_at = now + count * spacing_s * 2 + _GIVEN_UP_S
        return LookOrder(count, spacing_s)
