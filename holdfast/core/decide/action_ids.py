"""Ids of actions: none is used twice, not even by a controller whose journal has lost entries."""

EPOCH_IDS = 10**6  # numbers that one life of a controller may give


class ActionIds:
    """An iterator of action ids. It never repeats an id, because a node ignores one that it has carried out."""

    def __init__(self) -> None:
        self._next = 1

    def __iter__(self) -> "ActionIds":
        return self

    def __next__(self) -> int:
        self._next += 1
        return self._next - 1

    def skip_to(self, number: int) -> None:
        self._next = max(self._next, number + 1)
