"""The planned restart that is under way, and its record. While it lasts, the job has no open incident."""

from collections.abc import Mapping

import msgspec

from holdfast.core.incident import incident_text
from holdfast.core.incident.open_incident import Incident
from holdfast.model.decider_events import Progress
from holdfast.model.incident_record import Change


class Pause(msgspec.Struct, kw_only=True):
    """A planned restart, from its order to the first step after it."""

    why: str
    generation: int
    asked_at: float
    good_step: int
    good_at: float
    counted: bool
    numbered: bool = False
    first_asked_at: float = 0.0  # as in Change
    earlier_s: dict[str, float] = {}
    stopped_at: float = 0.0
    released_at: float = 0.0  # when it was no longer held
    ordered_at: float = 0.0  # as in Record
    launched_at: float = 0.0
    evicted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    for_release: int = 0  # 0: it is for something else
    brought_in: int = 0  # the release that came in with it
    apart: str = ""  # as in Record
    parked: bool = False  # ranks are told to park instead of being ended
    kept: int = 0  # as in Record
    renewed: int = 0
    short: str = ""

    @classmethod
    def begin_pause(cls, now: float, why: str, generation: int, good: Progress | None) -> "Pause":
        good_step, good_at = (good.step, min(good.at, now)) if good else (-1, now)
        counted, numbered = (good.counted, good.numbered) if good else (False, False)
        return cls(
            why=why,
            generation=generation,
            asked_at=now,
            good_step=good_step,
            good_at=good_at,
            counted=counted,
            numbered=numbered,
        )

    def on_late_step(self, event: Progress) -> None:
        """Record a step that ranks made before they ended, although its report came after the restart was ordered."""
        if event.step > self.good_step or self.good_step < 0:
            self.good_step, self.good_at = event.step, max(self.good_at, event.at)
            self.counted, self.numbered = event.counted, event.numbered

    def on_evicted(self, nodes: tuple[str, ...], ordered: Mapping[str, str]) -> None:
        """Record nodes that leave; why they do, the reason of the restart has told."""
        self.evicted += nodes

    def take_over(self, before: "Pause") -> None:
        """Take the last step from `before`, the planned restart that this one replaces before any rank made a step, and
        what its time was spent for."""
        last = Progress(generation=0, step=-1, at=self.asked_at, first_step=0, first_at=self.asked_at, counted=True)
        phases = incident_text.phases_s(before.make_change(last, 0))
        self.first_asked_at = before.first_asked_at or before.asked_at
        own = {incident_text.LAST_STEP: 0.0, incident_text.FIRST_STEP: 0.0}
        own[incident_text.BROKEN_OFF] = phases.get(incident_text.FIRST_STEP, 0.0)
        self.earlier_s = {name: seconds for name, seconds in (phases | own).items() if seconds}
        self.good_step, self.good_at, self.counted = before.good_step, before.good_at, before.counted
        self.numbered, self.brought_in = before.numbered, before.brought_in

    def make_failed_change(self, failed_at: float, release: int) -> Change:
        """Return the record of this planned restart, whose ranks failed before their first step."""
        last = Progress(generation=0, step=-1, at=failed_at, first_step=0, first_at=failed_at, counted=True)
        change = msgspec.structs.replace(self.make_change(last, release), failed=True)
        return msgspec.structs.replace(change, sentence=change_sentence(change))

    def make_change(self, event: Progress, release: int) -> Change:
        """Return the record of this planned restart, at the first step of the next generation."""
        stopped_at = max(self.stopped_at, self.asked_at)
        launched_at = max(self.launched_at or event.first_at, stopped_at)  # or it made steps before that was told of
        change = Change(
            why=self.why,
            generation=self.generation,
            release=release,
            good_step=self.good_step,
            good_at=min(self.good_at, stopped_at),
            asked_at=self.asked_at,
            first_asked_at=self.first_asked_at,
            earlier_s=self.earlier_s,
            stopped_at=stopped_at,
            ordered_at=self.ordered_at,
            launched_at=launched_at,
            resumed_at=max(event.first_at, launched_at),
            resumed_from=resumed_step(event, self),
            held_s=max(0.0, self.released_at - stopped_at) if self.released_at else 0.0,
            grouped_at=event.grouped_at,
            restoring_at=event.restoring_at,
            restored_at=event.restored_at,
            set_up_at=event.set_up_at,
            evicted=self.evicted,
            admitted=self.admitted,
            counted=self.counted and self.good_step >= 0,
            brought_in=self.brought_in if self.brought_in != self.for_release else 0,
            apart=self.apart,
            kept=self.kept,
            renewed=self.renewed,
            short=self.short,
        )
        return msgspec.structs.replace(change, sentence=change_sentence(change))


Interruption = Incident | Pause


def resumed_step(event: Progress, after: Interruption) -> int | None:
    """Return the step that a generation resumed from; None if it is unknown or steps are now numbered differently."""
    before = event.first_step - 1
    ours = after.numbered and event.restored_at > 0  # both count from what the Checkpointer restored
    # The Checkpointer names this very step, so our count and the script's numbers are the same.
    ours |= event.numbered and 0 <= event.restored == before <= after.good_step
    alike = after.good_step < 0 or after.counted or after.numbered == event.numbered or ours
    return before if not event.counted and (alike or before <= 0) else None


def change_sentence(change: Change) -> str:
    """Return one line about a planned restart for the person at the console."""
    return f"{_describe_restart(change)}{incident_text.describe_new_release(change)}"


def _describe_restart(change: Change) -> str:
    held_s = incident_text.sum_held_s(change)
    lost_s = change.resumed_at - change.good_at - held_s
    nodes = f"; {', '.join(change.evicted)} left" if change.evicted else ""
    nodes += f"; {', '.join(change.admitted)} admitted" if change.admitted else ""
    held = f", held for {held_s:.1f} s" if held_s else ""
    if change.failed:
        since = f" after step {change.good_step}" if change.good_step >= 0 and not change.counted else ""
        return f"{change.why}: {incident_text.FAILED_START}{nodes}{held}, {lost_s:.1f} s{since}"
    if incident_text.is_fresh_start(change):
        return f"{change.why}: restarted{nodes}{held}, {incident_text.describe_fresh_start(change)} and {lost_s:.1f} s"
    at = (
        f" from step {change.resumed_from}"
        if change.resumed_from is not None
        else incident_text.describe_unknown_resume(change)
    )
    lost = incident_text.lost_steps(change) or 0
    steps = f"{incident_text.count_steps(lost)} and " if lost > 0 else ""
    kept, on = incident_text.describe_kept(change), f" on {change.short}" if change.short else ""
    return f"{change.why}: restarted{at}{on}{kept}{nodes}{held}, lost {steps}{lost_s:.1f} s"
