"""A corpus of labelled logs, and how much of it a catalog gets right."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.logs.learned_words import LearnedWords
from holdfast.logs.log_diagnosis import ProcessEnds, diagnose_logs, open_log
from holdfast.model.last_words_diagnosis import Diagnosis

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
EVICT = "evict_and_restart"


class Label(msgspec.Struct, frozen=True, kw_only=True):
    klass: str = msgspec.field(name="class")
    group: str
    action: str
    source: str
    root_rank: int | None = None
    exit_code: int | None = None
    cascade: bool = False


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    label: Label
    found: Diagnosis

    @property
    def right(self) -> bool:
        return self.found.klass == self.label.klass

    @property
    def first_cause(self) -> bool:
        """Class and rank; where nobody can tell the rank, the class alone."""
        return self.right and self.label.root_rank in (None, self.found.root_rank)


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Shares from 0 to 1; 1 where there is nothing to be right about."""

    logs: int
    classes: int
    klass: float
    group: float
    action: float
    first_cause: float
    cascades: int
    evict_precision: float
    evict_recall: float
    evicted: int


def read_cases(folder: Path, every: int = 1) -> Iterator[tuple[str, Label, list[Path]]]:
    """All the cases of a folder, or every n-th of them: name, label and files."""
    for label_file in sorted(folder.glob("*/label.toml"))[::every]:
        label = msgspec.convert(tomllib.loads(label_file.read_text(encoding="utf-8")), Label)
        yield label_file.parent.name, label, sorted(label_file.parent.glob("*.txt"))


def judged(
    folder: Path, catalog: FailureCatalog, every: int = 1, learned: LearnedWords | None = None
) -> Iterator[Judged]:
    """Judge the cases of a folder by the rules, and if they are given by learned words too."""
    for name, label, paths in read_cases(folder, every):
        ends = ProcessEnds(code=label.exit_code)
        found = diagnose_logs([open_log(path) for path in paths], ends, catalog, learned=learned)
        yield Judged(name=name, label=label, found=found)


def score(cases: list[Judged]) -> Score:
    cascades = [case for case in cases if case.label.cascade]
    evicted = [case for case in cases if case.found.action == EVICT]
    evictable = [case for case in cases if case.label.action == EVICT]
    return Score(
        logs=len(cases),
        classes=len({case.label.klass for case in cases}),
        klass=_share([case.right for case in cases]),
        group=_share([case.found.group == case.label.group for case in cases]),
        action=_share([case.found.action == case.label.action for case in cases]),
        first_cause=_share([case.first_cause for case in cascades]),
        cascades=len(cascades),
        evict_precision=_share([case.label.action == EVICT for case in evicted]),
        evict_recall=_share([case.found.action == EVICT for case in evictable]),
        evicted=len(evicted),
    )


class ReliabilityBin(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of about the same confidence, and which share of them names the right class."""

    below: float  # the confidence under which they lie; the bin is a tenth wide
    count: int
    confidence: float  # on average
    right: float


def reliability(cases: list[Judged]) -> list[ReliabilityBin]:
    """Return the answers in tenths of their confidence. Of those at 0.9, nine in ten should be right."""
    tenths: dict[int, list[Judged]] = {}
    for case in cases:
        tenths.setdefault(min(int(case.found.confidence * 10), 9), []).append(case)
    return [
        ReliabilityBin(
            below=(tenth + 1) / 10,
            count=len(mine),
            confidence=sum(case.found.confidence for case in mine) / len(mine),
            right=_share([case.right for case in mine]),
        )
        for tenth, mine in sorted(tenths.items())
    ]


def _share(right: list[bool]) -> float:
    return sum(right) / len(right) if right else 1.0
