"""Decides which groups of a replay are faulty. A group is faulty if a rank crashes, if a loss is not finite, or if its
state differs from the state of most groups.

All groups do the same work: the same state, seeds, batches and number of ranks. Only their nodes differ. So rank i of
every group must compute the same bits at every step of every repeat, and all groups and repeats count as votes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

Place = tuple[int, int]  # step and rank within the group


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one group's replay."""

    failed: bool = False  # a rank crashed or hung
    bad_step: int = -1  # the first whose loss was not finite
    ended: bool = True  # every rank did all its steps; False: it was cut short by something else
    marks: Mapping[Place, int] = {}  # signatures of the state
    signed: Mapping[Place, int] = {}  # and of what was sent to others in the step, where the script signed it


class ReplayMajority:
    """Counts the votes of all groups so far, for each step and rank."""

    def __init__(self, comparable: bool = True) -> None:
        self.comparable = comparable  # the script said that its work follows from a seed
        self._votes: dict[Place, Counter[int]] = {}

    def judge_wave(self, told: Mapping[str, GroupResult]) -> dict[str, bool | None]:
        """Return for each group of a wave whether the fault showed; None if that cannot be decided."""
        good = {name: one for name, one in told.items() if not _has_failed(one)}
        for one in good.values() if self.comparable else ():
            for place, value in one.marks.items():
                self._votes.setdefault(place, Counter())[value] += 1
        return {name: True if name not in good else self._judge_group(one) for name, one in told.items()}

    def _judge_group(self, one: GroupResult) -> bool | None:
        differs = list(self._compare_marks(one.marks.items())) if self.comparable else []
        if True in differs:
            return True
        return None if None in differs or not one.ended else False

    def _compare_marks(self, marks: Iterable[tuple[Place, int]]) -> Iterable[bool | None]:
        for place, value in marks:
            votes = self._votes[place]
            usual, count = votes.most_common(1)[0]
            yield value != usual if 2 * count > votes.total() else None


def _has_failed(told: GroupResult) -> bool:
    return told.failed or told.bad_step >= 0
