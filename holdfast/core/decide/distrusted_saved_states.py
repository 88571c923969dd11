"""Saved states that a restart must not use, because the loss went wrong after them. After the first bad loss, the state
just before that loss is still trusted, since the cause may have passed. If the loss goes bad again at the same step or
earlier, this state is doubted as well, and only states verified as good are used.
"""

import msgspec

from holdfast.model.event import Progress
from holdfast.model.state_copy import Doubt

_KEPT = 64


class DoubtfulStates:
    def __init__(self) -> None:
        self.all: tuple[Doubt, ...] = ()
        self.verified = False  # only states that were found good will do
        self.not_after: int | None = None  # of the incident that is open
        self._bad = -1  # where it went wrong last

    def doubt_after(self, doubt: Doubt, progress: Progress | None) -> None:
        """Put these states in doubt. If an earlier loss went bad at step `not_after` or later, require verified states.
        In this case also doubt the state that this generation was restored from, unless its step is unknown."""
        not_after = doubt.not_after
        self.not_after, self.verified = not_after, 0 <= self._bad and not_after <= self._bad
        if self.verified and not (progress and progress.counted):  # before the state that it went on from
            self.not_after = min(not_after, progress.first_step - 2 if progress else not_after - 1)
        self._bad = max(self._bad, not_after)
        self.all = (*self.all, msgspec.structs.replace(doubt, not_after=self.not_after))[-_KEPT:]

    def clear_after(self, not_after: int) -> None:
        """Doubt only the states after `not_after`, because the batch that spoilt the loss is now skipped."""
        if self.all and self.not_after is not None:
            self.not_after, self.verified = not_after, False
            self.all = (*self.all[:-1], msgspec.structs.replace(self.all[-1], not_after=not_after))

    def on_training(self) -> None:
        """Drop the open incident's limit on which states may be restored, because the job trains again."""
        self.not_after, self.verified = None, False
