"""Holds the figures that documents quote: each stands where a record is named, or is said to have none."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.test_docs import FENCED, PAGES

UNIT = "s|ms|µs|microseconds|%|points|[KMGT]i?B(?:/s)?"
FIGURE = re.compile(rf"\b\d+\.\d+ (?:{UNIT})(?!\w)|\b\d+\.\d+ (?:and|to) \d+\.\d+ ")
RECORD = re.compile(r"\b[a-z_-]+-\d{8}\.json\b|\bchaos\.jsonl\b")
ADMITTED = re.compile(r"[Nn]o\s+record\s+was\s+kept")
HEAD = re.compile(r"^(#+) (.+)", re.M)
BOLD = re.compile(r"^(?=\*\*)", re.M)  # where a paragraph with a name of its own begins

# Sections whose figures nobody has measured here: settings and goals, what follows from arithmetic, what others have
# published, versions. The simulator's have their record on the page; their sources are in its TOML files.
NOT_MEASURED = {
    "BENCHMARKS.md: What there is": "goals",
    "DIAGNOSE.md: How the first cause is found": "limits of the rule",
    "DST.md: Past defects, kept": "how often a fault strikes",
    "PROBES.md: Which node is bad": "a limit of the rule",
    "REPLAY.md: Dual-phase replay": "arithmetic",
    "SIMULATOR.md: What is simulated": "prices, each with its source in prices.toml",
    "SIMULATOR.md: Where it agrees with what is known, and where not": "what `holdfast sim validate` prints",
    "SIMULATOR.md: Assumptions": "assumptions and published figures",
    "USE.md: Where nodes come from": "versions",
    "USE.md: State that survives": "what numpy is beside Python",
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
        if not told and (found := FIGURE.findall(section.text)):
            yield f"{section.name}: {found[:3]}"


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
