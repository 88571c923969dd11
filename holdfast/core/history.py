"""The releases of a job as its journal tells of them: who brought each, when, and what became of it."""

from collections.abc import Iterable

import msgspec

from holdfast.model.action import Launch, Stage
from holdfast.model.event import Begin, Entry, Order, Outcome, Progress
from holdfast.model.release import Fate, Release

_OPEN = (Fate.STAGING, Fate.WAITING)


class Chapter(msgspec.Struct, frozen=True, kw_only=True):
    """One release and its life in the job."""

    release: Release
    at: float  # when it was brought
    fate: Fate
    why: str = ""
    launched_at: float = 0.0  # first; 0: it has not run
    steps: int = 0  # that were made with it, those done twice included


class History:
    """A fold over the journal; it reads nothing else."""

    def __init__(self) -> None:
        self.chapters: dict[int, Chapter] = {}
        self._staging: dict[int, int] = {}  # Stage without outcome: which release
        self._running = 0
        self._generation = 0
        self._before = 0  # steps of the running release in earlier generations

    @property
    def running(self) -> Release:
        """That ranks run, or will run first."""
        number = self._running or min(self.chapters, default=0)
        return self.chapters[number].release if number else Release(number=0)

    def wanted(self) -> tuple[Release, ...]:
        """What a node is to have before it can take ranks: the release that runs, and one that waits."""
        waiting = [c.release for c in self.chapters.values() if c.fate is Fate.WAITING]
        return tuple({release.number: release for release in (self.running, *waiting) if release.number}.values())

    def add(self, entry: Entry) -> None:
        match entry.event:
            case Begin(release=release):
                self.chapters[release.number] = Chapter(release=release, at=entry.at, fate=Fate.WAITING)
            case Outcome(action=id) if id in self._staging:
                self._staged(self._staging.pop(id), entry.event)
            case Progress() as progress if progress.generation == self._generation:
                self._set(self._running, steps=self._before + progress.step - progress.first_step + 1)
        for action in entry.decision.actions:
            match action:
                case Stage(id=id, release=release):
                    self._stage(entry, id, release)
                case Launch():
                    self._launch(entry, action)

    def _set(self, number: int, **fields: object) -> None:
        if number in self.chapters:
            self.chapters[number] = msgspec.structs.replace(self.chapters[number], **fields)

    def _stage(self, entry: Entry, id: int, release: Release) -> None:
        self._staging[id] = release.number
        if release.number not in self.chapters:
            self.chapters[release.number] = Chapter(release=release, at=entry.at, fate=Fate.STAGING)

    def _staged(self, number: int, outcome: Outcome) -> None:
        if self.chapters[number].fate is not Fate.STAGING:
            return
        if not outcome.ok and not outcome.failed:
            self._set(number, fate=Fate.REFUSED, why=outcome.detail)
            return
        self._merge(number)
        self._set(number, fate=Fate.WAITING)

    def _merge(self, newest: int) -> None:
        """Of several that wait only the newest will ever run."""
        for number, chapter in self.chapters.items():
            if number < newest and chapter.fate in _OPEN and not chapter.launched_at:
                self._set(number, fate=Fate.MERGED, why=f"release {newest} came while it waited")

    def _launch(self, entry: Entry, launch: Launch) -> None:
        number, before = launch.release.number, self._running
        self._generation = launch.generation
        if number and number not in self.chapters:
            self.chapters[number] = Chapter(release=launch.release, at=entry.at, fate=Fate.WAITING)
        if number != before:
            self._merge(number)
            self._leave(before, number, entry)
        launched_at = self.chapters[number].launched_at or entry.at if number else 0.0
        self._set(number, fate=Fate.RUNNING, launched_at=launched_at)
        self._running = number
        self._before = self.chapters[number].steps if number else 0

    def _leave(self, before: int, number: int, entry: Entry) -> None:
        if before > number and isinstance(entry.event, Order):
            self._set(before, fate=Fate.ROLLED_BACK, why=f"rolled back by {entry.event.who}")
        elif before > number:
            self._set(before, fate=Fate.ROLLED_BACK, why=entry.decision.reason)
        else:
            self._set(before, fate=Fate.REPLACED, why=f"release {number} took its place")


def fold(entries: Iterable[Entry]) -> History:
    history = History()
    for entry in entries:
        history.add(entry)
    return history
