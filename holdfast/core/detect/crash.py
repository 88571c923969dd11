"""crash: a rank ended badly; its code and last words say how, and whose fault that is likely to be."""

import re

import msgspec

from holdfast.core.story import ending
from holdfast.model.alarm import Alarm, Kind
from holdfast.model.signal import Exit

_MUTE = (-9, -15)  # SIGKILL and SIGTERM leave no time for last words: what was said before is about something else
_EVIDENCE = 12  # lines kept in the journal
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')
_RAISED = re.compile(r"^(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout)\b.*)$")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before every line of a traceback once a group is up


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of knowledge about last words."""

    klass: str
    group: str
    action: str
    sample: str
    source: str
    pattern: str = ""
    code: int | None = None  # matches the exit code alone, where no words match
    weight: int = 1
    hint: str = ""


class Catalog:
    def __init__(self, rows: tuple[Row, ...]) -> None:
        self.rows = rows
        self._patterns = [(row, re.compile(row.pattern)) for row in rows if row.pattern]
        self._codes = {row.code: row for row in rows if row.code is not None and not row.pattern}

    def match(self, line: str) -> list[Row]:
        return [row for row, pattern in self._patterns if pattern.search(line)]

    def classify(self, code: int, words: tuple[str, ...]) -> Row | None:
        """The weightiest row that any line matches; of equals the one that was said first."""
        found = [row for line in words for row in self.match(line)]
        if found:
            return max(found, key=lambda row: row.weight)
        return self._codes.get(code)


def alarm_of(exit: Exit, catalog: Catalog) -> Alarm:
    words = tuple(_RANK.sub("", line) for line in exit.words)
    row = catalog.classify(exit.code, (exit.latched,) if exit.code in _MUTE else (*words, exit.latched))
    raised = exit.latched or next((m["text"] for w in reversed(words) if (m := _RAISED.match(w))), "")
    reason = ending(exit.code) + (f" ({raised[:200]})" if raised and exit.code > 0 else "")
    klass = row.klass if row else ""
    return Alarm(
        kind=Kind.CRASH,
        at=exit.at,
        suspects=(exit.node,),
        ranks=(exit.rank,),
        generation=exit.generation,
        code=exit.code,
        klass=klass,
        group=row.group if row else "",
        reason=reason,
        signature=f"{klass or 'exit'} {exit.code} {_origin(words)}".rstrip(),
        evidence=exit.words[-_EVIDENCE:],
    )


def _origin(words: tuple[str, ...]) -> str:
    """Where it was raised: the innermost frame of the last traceback."""
    frames = [m for w in words if (m := _FRAME.match(w))]
    return f"{frames[-1]['file'].rsplit('/', 1)[-1]}:{frames[-1]['line']}" if frames else ""
