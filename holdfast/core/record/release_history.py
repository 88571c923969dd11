"""The history of a job's releases: who brought each one, when, its fate, and how many steps it made."""

from collections.abc import Iterable, Mapping

import msgspec

from holdfast.core.record.job_account import ReleaseRun
from holdfast.model.action import Launch, Stage
from holdfast.model.code_release import Fate, Release
from holdfast.model.decider_events import Begin
from holdfast.model.journal_entry import Entry


class ReleaseChapter(msgspec.Struct, frozen=True, kw_only=True):
    """One release and its history in the job."""

    release: Release
    fate: Fate
    why: str = ""
    at: float  # when it was brought
    launched_at: float = 0.0  # first; 0: it has not run
    steps: int = 0  # that were made with it and by none before it
    redone: int = 0  # steps made with it that had been made before
    unsure: bool = False  # as in ReleaseRun


def new_and_redone(made: ReleaseRun | ReleaseChapter) -> tuple[str, str]:
    """Return how many new and redone steps a release made, with "at most" and "at least" if that is not exact."""
    most, least = ("at most ", "at least ") if made.unsure else ("", "")
    return f"{most}{made.steps}", f"{least}{made.redone}"


class ReleaseOverview(msgspec.Struct, frozen=True, kw_only=True):
    """All releases of a job, the oldest first."""

    running: int  # the number of the one that ranks run, or will run first
    releases: tuple[ReleaseChapter, ...]


class ReleaseHistory:
    """Reads from the journal when each release was ordered and first launched, and tells its history."""

    def __init__(self) -> None:
        self._brought: dict[int, float] = {}
        self._launched: dict[int, float] = {}

    def add(self, entry: Entry) -> None:
        match entry.event:
            case Begin(release=release):
                self._brought[release.number] = entry.at
        for action in entry.decision.actions:
            match action:
                case Stage(release=release):
                    self._brought.setdefault(release.number, entry.at)
                case Launch(release=release):
                    self._launched.setdefault(release.number, entry.at)

    def list_chapters(
        self,
        known: Mapping[int, Release],
        fates: Mapping[int, Fate],
        reasons: Mapping[int, str],
        ran: Iterable[ReleaseRun],
    ) -> tuple[ReleaseChapter, ...]:
        """Return the chapters of all releases, the oldest first."""
        made = {one.release: one for one in ran}
        return tuple(
            ReleaseChapter(
                release=release,
                fate=fates[number],
                why=reasons.get(number, ""),
                at=self._brought.get(number, 0.0),
                launched_at=self._launched.get(number, 0.0),
                steps=made[number].steps if number in made else 0,
                redone=made[number].redone if number in made else 0,
                unsure=number in made and made[number].unsure,
            )
            for number, release in sorted(known.items())
        )
