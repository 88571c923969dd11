"""Knows how many steps the optimizer has made, beside the numbers that the script gives to its steps."""


class StepNumbers:
    """The steps of one rank: those that its script tells, and those that are counted. Every script imports this."""

    def __init__(self) -> None:
        self.told = -1  # the newest that the script has told itself
        self.counted = 0  # by the optimizer's hook, in this process
        self._origin = -1  # made before these; -1: nobody knows
        self.is_restored = False  # whether a restored state says so

    def on_restored(self, made: int) -> None:
        """Take in how many steps led to the state that was restored; -1 if it does not say."""
        if made >= 0:
            self._origin, self.is_restored = made, True

    def go_on_from(self, step: int) -> int:
        """Return how many steps came before the first counted one: as inferred, unless a restored state knows."""
        self._origin = self._origin if self.is_restored else step
        return self._origin

    @property
    def made(self) -> int:
        """How many steps the optimizer has made, all in all; -1 if that is not known, or if the script numbers its
        steps otherwise: it may count epochs."""
        made = self._origin + self.counted if self._origin >= 0 else -1
        return made if self.told < 0 or made - 1 <= self.told <= made else -1
