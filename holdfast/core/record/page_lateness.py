"""The map of lateness as the page shows it: in rows of ranks, and renewed now and then."""

_ROW, _HELD_S = 64, 20.0


class HeldLateness:
    """The map of lateness as pages have it: a new one every 20 s is at most 60 KB a minute for 16,384 ranks."""

    def __init__(self) -> None:
        self._rows: tuple[str, ...] = ()
        self._until = 0.0

    def hold(self, now: float | None, told: str) -> tuple[str, ...]:
        """Return the rows to show, given the newest map; those from before while they are new enough."""
        rows = tuple(told[at : at + _ROW] for at in range(0, len(told), _ROW))
        if now is None or now >= self._until or len(rows) != len(self._rows):
            self._rows, self._until = rows, (now or 0.0) + _HELD_S
        return self._rows
