"""The history of a job's releases: who brought each one, when, its fate, and how many steps it made."""

from collections.abc import Mapping

import msgspec

from holdfast.model.action import Launch, Stage
from holdfast.model.event import Begin, Entry, Progress
from holdfast.model.release import Fate, Release


class ReleaseChapter(msgspec.Struct, frozen=True, kw_only=True):
    """One release and its history in the job."""

    release: Release
    fate: Fate
    why: str = ""
    at: float  # when it was brought
    launched_at: float = 0.0  # first; 0: it has not run
    steps: int = 0  # that were made with it, those done twice included


class ReleaseOverview(msgspec.Struct, frozen=True, kw_only=True):
    """All releases of a job, the oldest first."""

    running: int  # the number of the one that ranks run, or will run first
    releases: tuple[ReleaseChapter, ...]


class ReleaseHistory:
    """Folds the journal into times and steps of each release; the fates come from the decider."""

    def __init__(self) -> None:
        self._brought: dict[int, float] = {}
        self._launched: dict[int, float] = {}
        self._steps: dict[int, int] = {}
        self._running = 0
        self._generation = 0
        self._before = 0  # steps of the running release in earlier generations

    def add(self, entry: Entry) -> None:
        match entry.event:
            case Begin(release=release):
                self._brought[release.number] = entry.at
            case Progress(generation=generation, step=step, first_step=first) if generation == self._generation:
                self._steps[self._running] = self._before + step - first + 1
        for action in entry.decision.actions:
            match action:
                case Stage(release=release):
                    self._brought.setdefault(release.number, entry.at)
                case Launch(release=release, generation=generation):
                    self._launched.setdefault(release.number, entry.at)
                    self._running, self._generation = release.number, generation
                    self._before = self._steps.get(release.number, 0)

    def list_chapters(
        self, known: Mapping[int, Release], fates: Mapping[int, Fate], reasons: Mapping[int, str]
    ) -> tuple[ReleaseChapter, ...]:
        """Return the chapters of all releases, the oldest first."""
        return tuple(
            ReleaseChapter(
                release=release,
                fate=fates[number],
                why=reasons.get(number, ""),
                at=self._brought.get(number, 0.0),
                launched_at=self._launched.get(number, 0.0),
                steps=self._steps.get(number, 0),
            )
            for number, release in sorted(known.items())
        )
