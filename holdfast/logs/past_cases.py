"""The store of past failures over all runs: how each was diagnosed, what was done, and what people say it was.

It is one private file of bounded size. A failure is known by its telling lines, which are masked before they are kept.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.config import ConfigError
from holdfast.decoding import from_json
from holdfast.logs.failure_likeness import measure_likeness, read_words

_SAME = 0.9  # so like that one entry serves for both
_KEPT = 300
_FILE_BYTES = 8 << 20
NEAREST = 3


class PastCase(msgspec.Struct, frozen=True, kw_only=True):
    lines: tuple[str, ...]  # telling ones, masked
    klass: str
    said_by: Literal["rules", "model", "person"]
    at: float  # when it came last
    note: str = ""  # in words, from who has said it
    outcome: str = ""  # what was done, and whether training went on
    times: int = 1  # that it came

    @property
    def id(self) -> str:
        return "f" + hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:8]


class NearCase(msgspec.Struct, frozen=True, kw_only=True):
    likeness: float
    case: PastCase


class PastCases:
    """The file of past failures. Every change rewrites it under a lock, and raises ConfigError if this fails."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_all(self) -> tuple[PastCase, ...]:
        try:
            with self._path.open("rb") as file:
                content = file.read(_FILE_BYTES + 1)
        except FileNotFoundError:
            return ()
        except OSError as e:
            raise ConfigError(f"cannot read {self._path}: {e.strerror}") from None
        try:
            return from_json(content, tuple[PastCase, ...])
        except msgspec.DecodeError as e:
            raise ConfigError(f"{self._path} cannot be understood ({e}); remove it to begin anew") from None

    def find_nearest(self, lines: Sequence[str]) -> tuple[NearCase, ...]:
        """Return the past failures that are most similar to this one, nearest first. The list is short, but always
        contains the most similar failure whose class a person has given."""
        asked = read_words(lines)
        found = [
            NearCase(likeness=likeness, case=past)
            for past in self.read_all()
            if (likeness := round(measure_likeness(asked, read_words(past.lines)), 2)) > 0
        ]
        found.sort(key=lambda one: (-one.likeness, one.case.said_by != "person"))
        spoken = next((one for one in found if one.case.said_by == "person"), None)
        return tuple(one for place, one in enumerate(found) if place < NEAREST or one is spoken)

    def keep_case(self, failure: PastCase) -> str:
        """Add a failure, or merge it into the entry of the same failure; return the entry's id. Only a person can
        replace what a person said about a failure."""
        words = read_words(failure.lines)
        with self._changing() as kept:
            same = next((past for past in kept if measure_likeness(words, read_words(past.lines)) >= _SAME), None)
            if same is not None:
                kept.remove(same)
                failure = _merge_cases(same, failure)
            kept.append(failure)
        return failure.id

    def note_outcome(self, id: str, outcome: str) -> None:
        """Record what became of a failure; do nothing if its entry is gone."""
        with self._changing() as kept:
            kept[:] = [msgspec.structs.replace(past, outcome=outcome) if past.id == id else past for past in kept]

    @contextmanager
    def _changing(self) -> Iterator[list[PastCase]]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                kept = list(self.read_all())
                yield kept
                self._replace_file(_drop_oldest(kept))
            finally:
                os.close(lock)
        except OSError as e:
            raise ConfigError(f"cannot write {self._path}: {e.strerror}") from None

    def _replace_file(self, kept: Sequence[PastCase]) -> None:
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(kept))
        new.replace(self._path)


def _merge_cases(old: PastCase, new: PastCase) -> PastCase:
    believed = old if old.said_by == "person" and new.said_by != "person" else new
    return msgspec.structs.replace(
        believed, lines=new.lines, at=new.at, outcome=new.outcome or old.outcome, times=old.times + new.times
    )


def _drop_oldest(kept: list[PastCase]) -> list[PastCase]:
    """Return the entries to keep, up to the limit: people's corrections before others, and newer before older."""
    chosen = sorted(kept, key=lambda past: (past.said_by != "person", -past.at))[:_KEPT]
    return sorted(chosen, key=lambda past: past.at)
