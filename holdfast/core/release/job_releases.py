"""The releases of the user's code in a job: the running one, the waiting one, and those to roll back to.

During a recovery only one thing is changed at a time, so a new release is on trial. If a failure comes in its first
`trial_steps` steps, the release is suspected before any machine. On its first day it is rolled back before a person is
asked. A release that was rolled back is not taken again.
"""

from collections.abc import Iterator, Sequence

import msgspec

from holdfast.model.action import Action, Say, Stage
from holdfast.model.code_release import Fate, Release
from holdfast.model.decider_events import Order, Outcome, Progress

_SUSPECT_S = 86400.0  # a release that ran for a day is no longer the newest thing that changed


class PendingUpdate(msgspec.Struct, frozen=True):
    """An update order whose release is still being staged."""

    number: int
    now: bool
    window_s: float


class JobReleases:
    """The known releases and their fates, as part of the job's state."""

    def __init__(self, first: Release, trial_steps: int) -> None:
        self.running = first
        self.waiting: Release | None = None  # staged everywhere, for the next launch
        self.due_at: float | None = None  # when the one that waits gets a restart of its own
        self.known = {first.number: first}
        self.fates = {first.number: Fate.RUNNING}
        self.told: dict[int, str] = {}  # why a release met its fate
        self.staging: dict[int, PendingUpdate] = {}  # by the id of the action
        self.mixed = False  # the running one came in together with other machines
        self._trial_steps = trial_steps
        self._made = 0  # steps in a row by the running one
        self._since: dict[int, float] = {}  # when each first ran
        self._ran: list[int] = []  # those that made steps before it, newest last
        self._left: tuple[Release, str] | None = None  # to be gone back from, and why

    # --- orders ------------------------------------------------------------------------------------------------

    def order_update(self, order: Order, nodes: Sequence[str], ids: Iterator[int]) -> tuple[str, tuple[Action, ...]]:
        """Check and stage a newer release while the job goes on; refuse code that was rolled back before."""
        assert order.release is not None
        if bad := self.rolled_back_as(order.release):
            said = f"this is release {bad} again, which was rolled back: {self.told[bad]}"
            return said, (Say(text=f"update refused: {said}"),)
        number = max(self.known) + 1
        release = msgspec.structs.replace(order.release, number=number, who=order.who)
        self.known[number], self.fates[number] = release, Fate.STAGING
        action = Stage(id=next(ids), release=release, nodes=tuple(nodes))
        self.staging[action.id] = PendingUpdate(number, order.now, order.window_s)
        return f"release {number} is checked and staged", (action,)

    def on_staged(self, now: float, event: Outcome, active: set[str]) -> tuple[str, tuple[Action, ...]]:
        """Record the outcome of staging a release. The release waits, or was refused because staging failed on an
        `active` node, or is merged: a newer release has come before this one ran."""
        taken = self.staging.pop(event.action)
        number, failed = taken.number, {node: why for node, why in event.failed.items() if node in active}
        if failed or not (event.ok or event.failed):
            why = (
                "; ".join(f"{node}: {said}" for node, said in sorted(failed.items())) or event.detail or "not said why"
            )
            self._set_fate(number, Fate.REFUSED, why)
            said = f"release {number} was refused, and release {self.running.number} stays: {why}"
            return f"release {number} refused", (Say(text=said),)
        if number < max((n for n, fate in self.fates.items() if fate is Fate.WAITING), default=0):
            self._set_fate(number, Fate.MERGED, "a newer one was staged before it")
            return f"release {number} is staged, and older than the one that waits", ()
        if self.waiting is not None:
            self._set_fate(self.waiting.number, Fate.MERGED, f"release {number} came before it had run")
        self.waiting, self.fates[number] = self.known[number], Fate.WAITING
        self.due_at = now if taken.now else now + taken.window_s
        rides = "" if taken.now else ": it rides on the next restart"
        return f"release {number} is staged{rides}", ()

    def rollback_refusal(self, number: int) -> str:
        """Return why the job cannot go back to this release; "" if it can. 0 stands for the previous release."""
        if number == 0:
            return "" if self.previous_release is not None else "there is no release to go back to"
        if number not in self.known:
            return f"there is no release {number}; there are {', '.join(map(str, sorted(self.known)))}"
        if number == self.running.number:
            return f"release {number} is the one that runs"
        if self.fates[number] in (Fate.STAGING, Fate.REFUSED):
            return f"release {number} is not staged"
        return ""

    def order_rollback(self, now: float, number: int, who: str) -> str:
        """Go back to an older release at once, as a person ordered."""
        to = self.known[number] if number else self.previous_release
        assert to is not None
        self._leave_running(to, f"rolled back by {who}")
        self.due_at = now
        return f"going back to release {to.number}, as {who} wants"

    def roll_back(self, to: int, why: str) -> int:
        """Make the next launch use the older release `to`. Return the number of the release that is given up."""
        self._leave_running(self.known[to], why)
        return self.running.number

    def _leave_running(self, to: Release, why: str) -> None:
        if self.waiting is not None and self.waiting.number not in self._ran:
            self._set_fate(self.waiting.number, Fate.MERGED, "an older release was gone back to")
        self._left, self.waiting = (self.running, why), to

    # --- launches and steps ------------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        return self.waiting is not None and self.due_at is not None and self.due_at <= now

    def next_release(self, now: float, *, machines: bool, guess: bool) -> Release:
        """Choose the release of the next generation, and return it. If the seated nodes change (`machines`) on a
        verdict without proof (`guess`), an update waits. A rollback never waits."""
        if not self._since:
            self._since[self.running.number] = now
        if self.waiting is None or (guess and machines and self._left is None):
            return self.running
        old, self.running, self.waiting, self.due_at = self.running, self.waiting, None, None
        if self._left is not None:
            bad, why = self._left
            self._set_fate(bad.number, Fate.ROLLED_BACK, why)
            self._ran = [n for n in self._ran if n != self.running.number]
            self._made, self.mixed, self._left = self._trial_steps, False, None
        else:
            if self._made:
                self._ran = [*(n for n in self._ran if n != old.number), old.number]
            self._set_fate(old.number, Fate.REPLACED, f"by release {self.running.number}")
            self._made, self.mixed = 0, machines
        self._since.setdefault(self.running.number, now)  # one that is gone back to is as old as it is
        self._set_fate(self.running.number, Fate.RUNNING, "")
        return self.running

    def on_progress(self, event: Progress) -> None:
        self._made = max(self._made, event.step - event.first_step + 1)

    @property
    def previous_release(self) -> Release | None:
        """Return the newest release that ran before this one and was not rolled back; None if there is none."""
        good = [n for n in self._ran if self.fates[n] is not Fate.ROLLED_BACK]
        return self.known[good[-1]] if good else None

    @property
    def on_trial(self) -> bool:
        return self.previous_release is not None and self._made < self._trial_steps

    def is_suspect(self, now: float) -> bool:
        """Return whether a failure may be the running release's fault: it is on trial or less than a day old, and an
        older release exists to roll back to."""
        since = self._since.get(self.running.number, 0.0)
        return self.previous_release is not None and (self.on_trial or now < since + _SUSPECT_S)

    def wake_at(self) -> float | None:
        return self.due_at if self.waiting is not None else None

    def _set_fate(self, number: int, fate: Fate, why: str) -> None:
        self.fates[number], self.told[number] = fate, why

    def rolled_back_as(self, release: Release) -> int:
        """Return the number of a rolled-back release with the same code, command and environment; 0 without one."""
        same = (release.digest, release.argv, release.env)
        bad = [n for n, fate in self.fates.items() if fate is Fate.ROLLED_BACK]
        return next((n for n in bad if release.digest and _launch_key(self.known[n]) == same), 0)


def _launch_key(release: Release) -> tuple[str, tuple[str, ...], dict[str, str]]:
    return release.digest, release.argv, release.env
