"""Holds the figures that documents quote: each stands where a record is named, or is said to have none; and where
records are named, it is in one of them."""

import json
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.test_docs import FENCED, PAGES

UNIT = "s|ms|µs|microseconds|seconds|minutes|hours|times|copies|%|points|[KMGT]i?B(?:/s)?"
# Any number with decimals, with its unit if it has one; a version of a program is none.
FIGURE = re.compile(rf"(?<![\w.\-/=])\d[\d,]*\.\d+(?: (?:{UNIT})(?!\w))?(?![\w-]|\.\d)")
NAMES = "torch|Python|NCCL|Slurm|Kubernetes|Linux|kernel|TLS|DLRover|Ray Train|transformers|accelerate|lightning"
NAMES += "|deepspeed|torchtitan|megatron-core|Megatron|schemas of|server of|not start on|before|forms of"
LISTED = r"\d+\.\d+(?: or newer)?(?:(?:,| and|,? less with)\s+\d+\.\d+)*"
VERSION = re.compile(rf"(?:\b(?:{NAMES})|versions\) is)\s+{LISTED}(?! (?:{UNIT})(?!\w))", re.I)
CODE = re.compile(r"`[^`\n]*`(?: \([\d.]+\))?")  # and the default of a setting
# Whole numbers: those of two digits or more with a unit, where a sentence says that something was measured.
WHOLE = re.compile(rf"(?<![\w.,\-/=])\d[\d,]*\d (?:{UNIT})(?!\w)")
MEASURED = re.compile(r"\b(?:took|takes|measured|median|costs?)\b", re.I)
RECORD = re.compile(r"\b[a-z][a-z0-9_-]*-\d{8}\.json\b|\bchaos\.jsonl\b")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ADMITTED = re.compile(r"[Nn]o\s+record\s+was\s+kept")
HEAD = re.compile(r"^(#+) (.+)", re.M)
BOLD = re.compile(r"^(?=\*\*)", re.M)  # where a paragraph with a name of its own begins

# Sections whose figures nobody has measured here: settings and goals, what follows from arithmetic, what others have
# published, versions. The simulator's have their record on the page; their sources are in its TOML files.
NOT_MEASURED = {
    "BENCHMARKS.md: What there is": "goals",
    "DETECTORS.md: traffic and reach": "limits of the rule",
    "DETECTORS.md: loss_spikes": "limits of the rule",
    "JOURNAL.md: Events": "how often an event is sent",
    "KUBERNETES.md: Limits": "versions",
    "LADDER.md: Which remedy a cause gets": "limits of the rule",
    "LANGUAGE_MODEL.md: Asking a language model": "limits of the rule",
    "PROCESSES.md: What survives what": "limits of the rule",
    "REPLAY.md: What to expect": "what `holdfast sim replay --trials 1000` prints",
    "REPLAY.md: When it does not work": "arithmetic",
    "SECURITY.md: What is promised": "limits of the rule",
    "SLURM.md: Versions": "versions",
    "SNAPSHOTS.md: On a peer": "limits of the rule",
    "DIAGNOSE.md: How the first cause is found": "limits of the rule",
    "DST.md: Past defects, kept": "how often a fault strikes",
    "PROBES.md: Which node is bad": "a limit of the rule",
    "REPLAY.md: Dual-phase replay": "arithmetic",
    "SIMULATOR.md: What is simulated": "prices, each with its source in prices.toml",
    "SIMULATOR.md: Where it agrees with what is known, and where not": "what `holdfast sim validate` prints",
    "SIMULATOR.md: Assumptions": "assumptions and published figures",
    "USE.md: Where nodes come from": "versions",
}


# By what a number of a record is multiplied to be a figure with this unit.
SCALES = {
    "%": (1.0, 100.0),
    "points": (1.0, 100.0),
    "s": (1.0, 1e-3, 60.0),
    "ms": (1.0, 1e3, 1e-3),
    "µs": (1.0, 1e3, 1e6),
    "microseconds": (1.0, 1e3, 1e6),
    "B": (1.0, 1e-3, 1e-6, 1e-9, 1e-12, 2.0**-10, 2.0**-20, 2.0**-30),
}

# Figures that stand where a record is named, and are in none of the records named there: by section, with the reason.
NOT_IN_RECORD: dict[str, dict[str, str]] = {
    "BENCHMARKS.md: A restart on one H200": {"1.5": "a goal"},
    "BENCHMARKS.md: ByteRobust's evaluation": {
        **dict.fromkeys(("39.8", "6.77", "70.1", "99.2", "50"), "published"),
        **dict.fromkeys(("73.1", "11.4", "24.8", "8.6", "6.9", "11.2"), "published"),
        **dict.fromkeys(("40.5", "41.7", "40.9", "43.1", "43.5", "44.6"), "sums of two recorded figures"),
        "96.0": "of ettr-20261116.json, which another section names",
    },
    "BENCHMARKS.md: Faults over NCCL": {"19.6": "the median of four lists"},
    "BENCHMARKS.md: Hangs and slow ranks": {"0.2": "how long the job's steps are"},
    "BENCHMARKS.md: Silent corruption": {"0.03": "no record", "1.5": "the median of two flips, 1 and 2 steps"},
    "DIAGNOSE.md: How well it does": dict.fromkeys(
        ("97.9", "99.0", "81.1", "98.9", "97.8", "98.0"), "of rules that have learned from the same logs: no forecast"
    ),
    "GPUS.md: Restarts": {"98": "what the rank was told to hold"},
    "LIMITS.md: Not shown": dict.fromkeys(("24.11", "26.05"), "versions"),
    "REPLAY.md: With real processes": {"0.5": "how often the fault shows"},
    "SIMULATOR.md: What came out": {
        "0.55": "a price",
        **dict.fromkeys(("88.0", "88.3"), "of the model as it was before"),
        **dict.fromkeys(("139", "260"), "sums of prices"),
    },
    "SIMULATOR.md: In kept processes": {
        **dict.fromkeys(("0.09", "4.0", "2.6"), "differences of recorded figures"),
        "54": "from prices",
    },
    "SIMULATOR.md: Assumptions": dict.fromkeys(("22.70", "9.20", "0.12", "0.01", "0.1"), "published, or assumed"),
}


class Section(NamedTuple):
    name: str
    text: str


def sections(page: Path) -> Iterator[Section]:
    """The sections of a page, each with those below it; those of BENCHMARKS.md by themselves."""
    text = re.sub(r"^    .*\n", "", FENCED.sub("", page.read_text()), flags=re.M)
    heads = [*HEAD.finditer(text)]
    for place, head in enumerate(heads):
        later = [one.start() for one in heads[place + 1 :] if len(one[1]) <= max(len(head[1]), 2)]
        body = text[head.end() : later[0] if later else len(text)]
        if len(head[1]) == 1:  # what stands before the first section
            body = body[: next((one.start() - head.end() for one in heads[place + 1 :]), len(body))]
        if len(head[1]) > 2 and page.name != "BENCHMARKS.md":
            continue
        parts = [body.partition("\n##")[0]] if page.name == "BENCHMARKS.md" else [body]
        if head[2] == "Figures":  # has a record, or none, for each paragraph with a name
            parts = BOLD.split(parts[0])
        yield from (Section(f"{page.name}: {head[2]}", part) for part in parts)


def unrecorded(page: Path) -> Iterator[str]:
    """The sections with figures that name no record and do not say that there is none."""
    for section in sections(page):
        told = RECORD.search(section.text) or ADMITTED.search(section.text) or section.name in NOT_MEASURED
        if not told and (found := [*told_in(section.text), *measured_in(section.text)]):
            yield f"{section.name}: {found[:3]}"


def told_in(text: str) -> list[str]:
    """All numbers with decimals, each with its unit, but for those in code, defaults of settings and versions."""
    return [found[0] for found in FIGURE.finditer(VERSION.sub("", CODE.sub("", text)))]


def measured_in(text: str) -> list[str]:
    """Whole numbers with units in sentences that tell of a measurement."""
    parts = re.split(r"(?<=[.;:]) (?=[A-Z*])|\n[*|]", CODE.sub("", text))
    return [found for part in parts if MEASURED.search(part) for found in WHOLE.findall(part)]


@cache
def numbers_of(record: str) -> tuple[float, ...]:
    """All numbers of a record, those in its words as well; of a list also the mean, the median and the extent."""
    text = (RESULTS / record).read_text(encoding="utf-8")
    lines = text.splitlines() if record.endswith(".jsonl") else [text]
    return tuple({number for line in lines for number in _numbers_in(json.loads(line))})


def _numbers_in(value: Any) -> Iterator[float]:
    match value:
        case bool() | None:
            return
        case int() | float():
            yield float(value)
        case str():
            yield from (float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?", value))
        case dict():
            yield from (number for one in value.values() for number in _numbers_in(one))
        case list():
            yield from (number for one in value for number in _numbers_in(one))
            plain = [one for one in value if isinstance(one, int | float) and not isinstance(one, bool)]
            if plain:
                yield from (statistics.median(plain), statistics.fmean(plain), max(plain) - min(plain))


def figures_of(text: str) -> Iterator[tuple[str, str]]:
    """All figures, each with its unit; without one if none stands behind it, or one by which nothing is scaled."""
    for found in (*told_in(text), *measured_in(text)):
        number, _, unit = found.replace(",", "").partition(" ")
        yield number, unit if unit in SCALES or "B" in unit else ""


def is_in(numbers: tuple[float, ...], figure: str, unit: str) -> bool:
    """Whether the figure is one of the numbers, rounded."""
    anything = tuple({scale for scales in SCALES.values() for scale in scales})
    scales = SCALES.get(unit) or (SCALES["B"] if "B" in unit else anything)
    half = 0.5000001 * 10.0 ** -len(figure.partition(".")[2])
    return any(abs(number * scale - float(figure)) <= half for number in numbers for scale in scales)


def astray(page: Path) -> Iterator[tuple[str, str]]:
    """Figures, by section, that are in none of the records that are named there."""
    for section in sections(page):
        records = RECORD.findall(section.text)
        numbers = tuple(number for record in records for number in numbers_of(record))
        for figure, unit in figures_of(section.text) if records else ():
            if not is_in(numbers, figure, unit):
                yield section.name, figure


def test_figures_are_in_the_records_that_are_named_beside_them() -> None:
    found = {where for page in PAGES for where in astray(page)}
    excused = {(section, figure) for section, figures in NOT_IN_RECORD.items() for figure in figures}
    assert found - excused == set(), "in none of the records that the section names"
    assert excused - found == set(), "it is in a record now, or is no longer quoted"


def test_figures_have_a_record_or_are_said_to_have_none() -> None:
    assert [where for page in PAGES for where in unrecorded(page)] == []


def test_every_section_that_is_excused_is_there() -> None:
    assert set(NOT_MEASURED) <= {section.name for page in PAGES for section in sections(page)}


def test_figures_without_a_record_are_seen(tmp_path: Path) -> None:
    page, many = tmp_path / "A.md", tmp_path / "BENCHMARKS.md"
    page.write_text("# A\n\nIt takes 0.5 s.\n\n## B\n\nIt takes 7.2 ms (`x-20260101.json`).\n\n### C\n\nAnd 0.3 %.\n")
    figures = "**One.** 0.5 s.\n\n**Two.** 0.7 s (`x-20260101.json`).\n"
    many.write_text(f"# A\n\n## Figures\n\n{figures}\n### C\n\n0.8 s, see there.\n")
    found = [where for one in (page, many) for where in unrecorded(one)]
    assert found == ["A.md: A: ['0.5 s']", "BENCHMARKS.md: Figures: ['0.5 s']", "BENCHMARKS.md: C: ['0.8 s']"]
    page.write_text("# A\n\nIt takes 0.5 s; no\nrecord was kept.\n\n    holdfast: lost 0.7 s\n")
    assert [*unrecorded(page)] == []


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("| a | 1.7 |", ["1.7"]),
        ("3.2, 1.2 and 6.0: so", ["3.2", "1.2", "6.0"]),
        ("It is 17.1 times as long.", ["17.1 times"]),
        ("It took 36 s and 1,200 MB.", ["36 s", "1,200 MB"]),
        ("A wait of 30 s. Torch 2.13, `0.5 s`, `backup.duty` (0.25), Python 3.11 or newer.", []),
        ("Slurm 22.05, less with 24.11 and 26.05: 0.3 % more", ["0.3 %"]),
    ],
)
def test_what_a_figure_is(told: str, found: list[str]) -> None:
    assert [*told_in(told), *measured_in(told)] == found


def test_figures_that_a_record_does_not_have_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "A.md"
    named = "`benchmarks/results/nccl-exact-20261118.json`"
    page.write_text(f"# A\n\n## B\n\nAfter 12.6 s and 2.81 s, not 12.7 s or 3.7 s; 13.2 and 5.5 s ({named}).\n")
    assert [figure for _, figure in astray(page)] == ["12.7", "3.7"]
