"""Saved states that a restart must not use, because the loss went wrong after them. After the first bad loss, the state
just before that loss is still trusted, since the cause may have passed. If the loss goes bad again at the same step or
earlier, this state is doubted as well, and only states verified as good are used. A state is not doubted for a step
that was made from it before with a finite loss: the data, the code or a machine has changed, not the state.
"""

import msgspec

from holdfast.model.decider_events import Progress
from holdfast.model.state_doubt import Doubt

_KEPT = 64  # doubts
_REMEMBERED = 1024  # generations


class MadeSteps(msgspec.Struct, frozen=True):
    """The steps that one generation has made."""

    began: int  # the step of the state that it went on from
    last: int
    sound: int  # the last one that is known to have a finite loss

    def has_made(self, step: int) -> bool:
        return self.began < step <= self.last


_UNNUMBERED = MadeSteps(began=-1, last=1 << 62, sound=-1)  # it may have made any step


class DoubtfulStates:
    def __init__(self) -> None:
        self.all: tuple[Doubt, ...] = ()
        self.verified = False  # only states that were found good will do
        self.not_after: int | None = None  # of the incident that is open
        self._bad = -1  # where it went wrong last
        self._made: dict[int, MadeSteps] = {}  # by generation

    def on_progress(self, event: Progress) -> None:
        """Remember which steps a generation has made, and how far its losses were finite."""
        before = self._made.pop(event.generation, None)
        made = _UNNUMBERED
        if not event.counted:
            sound = max(before.sound if before else -1, event.step if event.loss is not None else -1)
            made = MadeSteps(began=event.first_step - 1, last=event.step, sound=sound)
        self._made[event.generation] = made
        if len(self._made) > _REMEMBERED:
            del self._made[next(iter(self._made))]

    def doubt_after(
        self, doubt: Doubt, progress: Progress | None, *, not_finite: bool = False, good_step: int | None = None
    ) -> None:
        """Put these states in doubt. If an earlier loss went bad at step `not_after` or later, require verified states.
        In this case also doubt the state that this generation was restored from, unless its step is unknown or, if the
        loss is `not_finite`, that state is sound. `good_step` is the last good step if it is earlier than `not_after`.
        """
        not_after, counted = doubt.not_after, progress is not None and progress.counted
        began = progress.first_step - 1 if progress else not_after
        again = 0 <= self._bad and not_after <= self._bad
        sound = not_finite and not counted and self._has_led_to(not_after + 1, doubt.generation, began)
        self.not_after, self.verified = not_after, again and not sound
        if self.verified and not counted:  # before the state that it went on from
            self.not_after = min(not_after, began - 1)
        if progress and not counted:
            self._made[doubt.generation] = MadeSteps(
                began=began, last=max(progress.step, not_after), sound=not_after if good_step is None else good_step
            )
        self._bad = max(self._bad, not_after)
        redone = not_finite and began < not_after and self.not_after < not_after
        until = not_after if redone else None
        self.all = (*self.all, msgspec.structs.replace(doubt, not_after=self.not_after, until=until))[-_KEPT:]

    def find_last_good(self, generation: int, not_after: int, progress: Progress | None) -> int:
        """Return the last good step of a generation whose loss went bad after `not_after`. This is an earlier one if
        the state that it went on from was made after a bad loss, and no finite loss of this generation says that the
        state was sound all the same."""
        made = self._made.get(generation)
        if progress is None or progress.counted or made is None or made.sound > made.began:
            return not_after
        good = []
        for number in self._find_makers(generation, made.began):
            before = [doubt.not_after for doubt in self.all if doubt.bans_state(number, made.began)]
            sound = self._made[number].sound
            if not before or sound >= made.began:
                return not_after
            good.append(min(*before, sound) if sound >= 0 else min(before))
        return min(not_after, *good) if good else not_after

    def _find_makers(self, generation: int, step: int) -> list[int]:
        """Return the earlier generations that may have made the state of `step`. If none is known to have come so far,
        the newest one that may have: its last steps may not have been heard of."""
        earlier = [number for number, made in self._made.items() if number < generation and made.began < step]
        return [number for number in earlier if self._made[number].has_made(step)] or sorted(earlier)[-1:]

    def _has_led_to(self, step: int, generation: int, began: int) -> bool:
        """Return whether every earlier generation that has made the state of step `began` made `step` with a finite
        loss. The state is one that they made: `generation` went on from it."""
        makers = [m for number, m in self._made.items() if number != generation and m.has_made(began)]
        return bool(makers) and all(made.sound >= step for made in makers)

    def trust_redone(self) -> None:
        """Trust states again from which sound steps were made a second time, if the job went on from several of them
        and the loss went bad at the same step each time. None of them is to blame then, but the data or the code."""
        step = self.all[-1].until if self.all else None
        if self.not_after is None or step is None or sum(doubt.until == step for doubt in self.all) < 2:
            return
        self.not_after, self.verified = step, False
        self.all = tuple(doubt.for_later_runs if doubt.until == step else doubt for doubt in self.all)

    def clear_after(self, not_after: int) -> None:
        """Doubt only the states after `not_after`, because the batch that spoilt the loss is now skipped."""
        if self.all and self.not_after is not None:
            self.not_after, self.verified = not_after, False
            self.all = (*self.all[:-1], msgspec.structs.replace(self.all[-1], not_after=not_after, until=None))

    def on_training(self) -> None:
        """Drop the open incident's limit on which states may be restored, because the job trains again."""
        self.not_after, self.verified = None, False
