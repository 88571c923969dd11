"""Interface through which the page reads a job: its journal, and its controller if one runs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from holdfast.model.journal_entry import Entry


class SourceError(Exception):
    """A source cannot answer; the text says why in one sentence."""


class JobPresence(msgspec.Struct, frozen=True, kw_only=True):
    """The status that a job's controller reports, or the reason why the job has no controller."""

    status: dict[str, Any] | None = None  # as the controller tells it; None: there is no controller
    absence: str = ""  # why there is none
    now: float | None = None  # of a job that runs; None: its time ends with its journal
    may_order: bool = False  # the controller takes orders, and from who looks here

    @property
    def is_watched(self) -> bool:
        """Whether a controller answers, so that there may soon be something new."""
        return self.status is not None


def may_order(status: dict[str, Any]) -> bool:
    """Return whether the caller that got this status may give orders. An older controller does not say, and refuses."""
    return status.get("right", "operate") in ("operate", "admin")


class PageSource(Protocol):
    def read_entries(self, after: int) -> Iterable[Entry]:
        """Return the journal's entries after number `after`; always called by the same thread."""

    def look_at_job(self) -> JobPresence:
        """Return the controller's status, or why none answers; runs in the same thread as `read_entries`."""

    def ask_controller(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request to the controller and return its answer. Raise SourceError if it refuses or no controller
        runs."""

    def look_at_rank(self, rank: int) -> dict[str, Any] | None:
        """Return what the controller knows of a rank now; None if no controller tells it."""

    def read_log(self, rank: int, generation: int = 0) -> tuple[str, ...]:
        """Return the last lines that a rank printed in this generation, or in its newest if `generation` is 0. Raise
        SourceError if this host does not have the rank's output."""

    def find_archive(self, digest: str) -> Path:
        """Return the archive of a release's tree. Raise SourceError if this host does not have it."""
