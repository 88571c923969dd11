"""Keeps the content of a job's web page up to date, and returns what has changed in it."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.core.record.page_view import PageFold, PageView
from holdfast.core.terminal_sanitizer import strip_tree
from holdfast.dash.page_assets import render_page
from holdfast.dash.page_source import PageSource, SourceError
from holdfast.dash.release_diff import compare_releases
from holdfast.logs.secret_masking import make_secret_masker

_PATCHES = 120  # that are kept; who is further behind gets the whole view again
_STORIES = 300  # of incidents, the newest, in a file
_LOGGED = 20  # of these, the newest, have lines of logs
_LINES, _LINE_CHARS = 40, 500  # of a rank's output, the last, in a story
_AT_ONCE, _AT_ONCE_S = 1000, 0.15  # entries, and seconds, that are read before the page shows the first, and then
_LONGER = 3  # so many times as long before it shows more

Sections = dict[str, Any]


def shown_sections(view: PageView) -> Sections:
    """Return the view as plain values, without control characters that could falsify the text, and without secrets in
    command lines."""
    sections: Sections = strip_tree(msgspec.to_builtins(view))
    sections["releases"] = make_secret_masker().mask_commands(sections["releases"])
    return sections


def compare_sections(before: Sections, after: Sections) -> Sections:
    """Return the sections that changed. Lists and objects among them have only their changed entries or fields."""
    return {name: _compare_values(before.get(name), new) for name, new in after.items() if before.get(name) != new}


def _compare_values(old: Any, new: Any) -> Any:
    if isinstance(old, list) and isinstance(new, list):
        changed = {str(n): row for n, row in enumerate(new) if n >= len(old) or old[n] != row}
        return {"$length": len(new), "$rows": changed}
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return {"$fields": {key: value for key, value in new.items() if old[key] != value}}
    return {"$whole": new}


class PageFeed:
    """Reads new journal entries and keeps versions of the page's view. Other threads may call only `patches_since`."""

    def __init__(self, source: PageSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._fold = PageFold()
        self._patches: deque[tuple[int, bytes]] = deque(maxlen=_PATCHES)
        self._sections: Sections = {}
        self._at_once_s = _AT_ONCE_S
        self.version = 0
        self.whole = b""  # the newest version, encoded
        self.behind = True  # entries are there that have not been read
        self.is_watched = False  # a controller answers

    def refresh_view(self) -> None:
        """Read new entries, and make a new version if anything has changed."""
        self.behind, began_at = False, self._clock()
        for count, entry in enumerate(self._source.read_entries(self._fold.seq), 1):
            self._fold.add(entry)
            if count % _AT_ONCE == 0 and self._clock() >= began_at + self._at_once_s:
                self.behind, self._at_once_s = True, _LONGER * self._at_once_s
                break
        seen = self._source.look_at_job()
        self.is_watched = seen.is_watched
        view = self._fold.make_view(seen.now, seen.status, seen.absence)
        after = shown_sections(view)
        after["reading"] = self.behind
        after["orders_taken"] = seen.may_order
        patch = compare_sections(self._sections, after)
        if not patch:
            return
        self.version += 1
        self._sections = after
        self._patches.append((self.version, msgspec.json.encode({"version": self.version, "changed": patch})))
        self.whole = msgspec.json.encode({"version": self.version, "sections": after})

    def patches_since(self, version: int) -> list[bytes] | None:
        """Return the changes since a version, the oldest first; None if the changes since then are no longer kept."""
        found = [(number, patch) for number, patch in list(self._patches) if number > version]
        if version > self.version or (version < self.version and (not found or found[0][0] != version + 1)):
            return None
        return [patch for _, patch in found]

    def render(self, summary: str = "") -> str:
        """Return the page as one file, with its present view and the stories of the newest incidents. `summary` is
        HTML that is seen where no script runs."""
        while self.behind:
            self.refresh_view()
        last = len(self._sections["incidents"]) + 1
        numbers = range(max(1, last - _STORIES), last + 1)
        told = {number: self.tell_story(number, logged=number > last - _LOGGED) for number in numbers}
        stories = {number: story for number, story in told.items() if story}
        sections = self._sections | {"orders_taken": False, "reading": False}
        return render_page(f"holdfast: {self._sections['head']['run_id']}", sections, stories, summary)

    def tell_story(self, number: int, *, logged: bool = True) -> Any:
        """Return the story of an incident as plain values, with the last output of the ranks that the story names.
        Return None if there is no such incident. Without `logged`, leave the output out."""
        story = self._fold.tell_story(number)
        if story is None:
            return None
        logs = [self._read_log(rank, story.generation) for rank in story.ranks if logged and story.generation]
        if logs and 0 not in story.ranks and not any("lines" in log for log in logs):
            logs.append(self._read_log(0, story.generation))  # in many scripts it alone prints
        return strip_tree(msgspec.to_builtins(story) | {"logs": logs})

    def _read_log(self, rank: int, generation: int) -> dict[str, Any]:
        try:
            _, *lines = self._source.read_log(rank, generation)
        except SourceError as e:
            return {"rank": rank, "absence": str(e)}
        return {"rank": rank, "lines": [line[:_LINE_CHARS] for line in lines[-_LINES:]]}

    def compare_release(self, number: int) -> Any:
        """Return what a release changed against the one before it, as plain values; None if either is unknown."""
        pair = self._fold.find_releases(number)
        return strip_tree(msgspec.to_builtins(compare_releases(self._source, *pair))) if pair else None
