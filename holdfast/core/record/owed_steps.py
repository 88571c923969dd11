"""Charges each step that is made again to the newest incident or planned restart that lost it."""

import msgspec

from holdfast.core.incident.incident_text import lost_steps
from holdfast.core.record.job_account import RedoneSteps
from holdfast.model.incident_record import Change, Record


class OwedSteps:
    """Lost steps that have not been made again yet, each charged to the restart that lost it. If a failure comes while
    steps are being redone, its restart is charged only with steps made since the restart before. The other steps stay
    charged to older restarts. So each restart is charged with as many steps as it reported lost."""

    def __init__(self) -> None:
        self.redone: list[RedoneSteps] = []
        self._last: list[tuple[int, int]] = []  # the last step that is owed to which of these; the newest has the least

    def add_restart(self, record: Record | Change, whose: RedoneSteps, best: int) -> None:
        """Record the steps that a restart lost; `best` is the furthest step ever made."""
        if record.resumed_from is None:
            self._last.clear()
            return
        lost = lost_steps(record)
        last = best if lost is None else record.resumed_from + lost
        self._last = [older for older in self._last if older[0] > last]
        last = last if self._last else max(last, best)  # somebody heard too late of a step that was made
        if last > record.resumed_from:
            self._last.append((last, len(self.redone)))
            self.redone.append(whose)

    def find_debt(self, step: int) -> tuple[int, RedoneSteps] | None:
        """Return what is known of step `step` + 1 if a restart lost it: the last step charged to that restart, and the
        restart's record. Return None if no restart lost the step."""
        return next(((last, self.redone[whose]) for last, whose in reversed(self._last) if last > step), None)

    def add_redone(self, first: int, count: int) -> None:
        """Record `count` steps from step `first` on as made again, for the restarts to which they are charged."""
        end = first + count
        for last, whose in reversed(self._last):
            here = max(0, min(end, last + 1) - first)
            one, first = self.redone[whose], first + here
            self.redone[whose] = msgspec.structs.replace(one, steps=one.steps + here)
