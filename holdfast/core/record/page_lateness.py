"""The map of slow ranks as the page shows it, in rows of ranks. A shown map is kept for some seconds."""

_ROW, _HELD_S = 64, 20.0


class HeldLateness:
    """The map that pages show now. It changes every 20 s, so for 16,384 ranks it costs at most 60 KB a minute."""

    def __init__(self) -> None:
        self._rows: tuple[str, ...] = ()
        self._until = 0.0

    def hold(self, now: float | None, told: str) -> tuple[str, ...]:
        """Return the rows that pages show now. `told` is the newest map. Its rows replace those shown before once these
        are 20 s old, or if the number of rows has changed."""
        rows = tuple(told[at : at + _ROW] for at in range(0, len(told), _ROW))
        if now is None or now >= self._until or len(rows) != len(self._rows):
            self._rows, self._until = rows, (now or 0.0) + _HELD_S
        return self._rows
