"""Tracks how many steps the optimizer has made, separately from the step numbers that the script reports."""


class StepNumbers:
    """The steps of one rank: the numbers that its script reports, and the optimizer's count."""

    def __init__(self) -> None:
        self.told = -1  # the newest that the script has told itself
        self.counted = 0  # by the optimizer's hook, in this process
        self._origin = -1  # made before these; -1: nobody knows
        self.is_restored = False  # whether a restored state says so

    def on_restored(self, made: int) -> None:
        """Record how many steps had been made when the restored state was saved; -1 if the state does not say."""
        if made >= 0:
            self._origin, self.is_restored = made, True

    def go_on_from(self, step: int) -> int:
        """Return how many steps came before the first counted one: by the restored state if there is one, or `step`."""
        self._origin = self._origin if self.is_restored else step
        return self._origin

    @property
    def made(self) -> int:
        """Return how many steps the optimizer has made; -1 if unknown, or if the script counts its steps otherwise."""
        made = self._origin + self.counted if self._origin >= 0 else -1
        return made if self.told < 0 or made - 1 <= self.told <= made else -1
