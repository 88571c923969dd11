"""Reads holdfast's own sentences in a saved console log: which lines belong to the last incident, and what it was."""

import re
from collections.abc import Sequence

import msgspec

from holdfast.core.log_analysis.line_prefixes import LogLine

_OPENED = re.compile(r"^holdfast: incident \d+[^:]*: (?!noted )")
_CLOSED = re.compile(r"^holdfast: .*; (?:restarted in place|evicted |gave up: |release \d+ was rolled back)")
_AFTER_CAUSE = r"(?:[;,]| at step | before any step | \d+ steps? after )"
_RAISED = re.compile(
    rf"\brank (?P<rank>\d+) on (?P<node>[\w.-]+) exited with code \d+ \((?P<raised>.*?)\){_AFTER_CAUSE}"
)
_SHORTAGES = {"(sender unknown)": False, "(the kernel killed for want of memory)": True}
_PRESSED = re.compile(rf"\(probably the OOM killer: (?P<pressed>.*?)\){_AFTER_CAUSE}")
_TRACEBACK = "Traceback (most recent call last)"


class ConsoleIncident(msgspec.Struct, frozen=True, kw_only=True):
    """The last incident of a console log, and what holdfast then knew about memory."""

    lines: list[LogLine]
    starved: bool | None = None
    pressed: str = ""


def read_last_incident(lines: Sequence[LogLine]) -> ConsoleIncident | None:
    """Return the last incident that a console log tells of; None if there is none. Other logs are kept whole.

    Training goes on after an incident, and a console shows all incidents of a run. So what was said before the end of
    the incident before, or after the end of this one, is about something else.
    """
    told = [p for p, said in enumerate(lines) if _OPENED.search(said.text) or _CLOSED.search(said.text)]
    if not told:
        return None
    newest = lines[told[-1]]
    closed = [p for p in told if lines[p].source == newest.source and _CLOSED.search(lines[p].text)]
    after = closed.pop() + 1 if closed and closed[-1] == told[-1] else len(lines)
    before = closed[-1] if closed else -1
    kept = [said for p, said in enumerate(lines) if said.source != newest.source or before < p < after]
    pressed = _PRESSED.search(newest.text)
    return ConsoleIncident(
        lines=[*kept, *_spoken_exception(kept, newest)],
        starved=next((starved for words, starved in _SHORTAGES.items() if words in newest.text), None),
        pressed=pressed["pressed"] if pressed else "",
    )


def _spoken_exception(lines: Sequence[LogLine], said: LogLine) -> list[LogLine]:
    """Return the exception that the sentence quotes as a line of its rank, unless the console shows its traceback."""
    found = _RAISED.search(said.text)
    if found is None or any(_TRACEBACK in line.text for line in lines):
        return []
    return [msgspec.structs.replace(said, text=found["raised"], rank=int(found["rank"]), node=found["node"])]
