"""For how long a controller may act on its lease, counted on a clock that goes on while the machine sleeps."""

import time
from pathlib import Path

from holdfast.journal.journal_errors import LeaseLostError


def boot_time() -> float:
    """Return the seconds since this machine booted. Unlike the monotonic clock, this one counts a suspend as well."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_boot_id() -> str:
    """Return a name for the time since this machine booted; "" if the kernel tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def no_lease() -> None:
    """Check the lease of a run that only one machine can carry: it needs none."""


class LeaseTerm:
    """The time until which nobody else can have the lease, judged by when we began to renew it."""

    def __init__(self, what: str, lasts_s: float, margin_s: float) -> None:
        """`what` names the lease in a sentence. The term ends `margin_s` before others may take the lease, because two
        clocks do not run alike."""
        self._what, self._for_s = what, lasts_s - margin_s
        self._until = 0.0

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - boot_time())

    def begin(self, asked_at: float) -> None:
        """Begin with a lease that was taken by a request of that time."""
        self._until = asked_at + self._for_s

    def renew(self, asked_at: float) -> None:
        """Go on with a lease that was renewed by a request of that time. Raise LeaseLostError if the answer came only
        after the term: another may have taken the lease before it was renewed."""
        self.check()
        self.begin(asked_at)

    def check(self) -> None:
        """Raise LeaseLostError if another controller may have the lease by now."""
        if not self.left_s:
            raise LeaseLostError(
                f"{self._what} has not been renewed for {self._for_s:g} s, so another controller may have it by now; "
                "this one ends"
            )
