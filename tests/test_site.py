"""The documentation site: it has every page, every name of the program, and no link that leads nowhere."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from holdfast.cli.command_dispatch import COMMANDS
from holdfast.controller.metrics import METRICS
from holdfast.model.action import Action
from holdfast.model.decider_events import Event
from holdfast.model.detector_alarm import Kind
from tests.site_pages import DOCS, ROOT, adapt_links, adapt_lists, find_diagrams, find_verbs, make_pages
from tests.test_docs import dead_links

FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?https?://"
)


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return make_pages()


def test_every_page_has_its_place(made: dict[str, str]) -> None:
    placed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(placed) == sorted([*made, *(page.name for page in DOCS.glob("*.md"))])


def test_links_of_the_site_lead_somewhere(made: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "figures").symlink_to(DOCS / "figures")
    for picture in DOCS.glob("*.png"):
        (tmp_path / picture.name).symlink_to(picture)
    for name, text in made.items() | {(page.name, adapt_links(page.read_text(), DOCS)) for page in DOCS.glob("*.md")}:
        (tmp_path / name).write_text(text)
    assert [link for page in sorted(tmp_path.glob("**/*.md")) for link in dead_links(page)] == []


def test_the_runbook_has_every_kind_of_alarm() -> None:
    parts = re.split(r"^## (\w+)$", (DOCS / "RUNBOOK.md").read_text(), flags=re.M)
    entries = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert entries.keys() == set(Kind)
    for kind, entry in entries.items():
        assert all(f"**{who}**" in entry for who in ("You see", "Holdfast", "You")), kind


def test_the_reference_has_every_name(made: dict[str, str], setting_names: list[str]) -> None:
    explained = re.findall(r"^\| `([\w.]+)` \| .* \| \[.+\]\(.+\) \|$", made["reference/settings.md"], re.M)
    assert explained == setting_names
    structs = (*get_args(Event), *get_args(Action))
    assert [struct for struct in structs if not struct.__doc__] == [], "these have no docstring"
    fields = re.findall(r"^(?:### (\w+)|\* `(\w+)` \(.+)$", made["reference/events.md"], re.M)
    told = [[(struct.__name__, ""), *(("", name) for name in struct.__struct_fields__)] for struct in structs]
    assert fields == [pair for pairs in told for pair in pairs]
    assert re.findall(r"^\| `(holdfast_\w+)` ", made["reference/metrics.md"], re.M) == list(METRICS)
    asked = set(re.findall(r"^\$ holdfast ([\w ]+) --help\nusage: holdfast \1\b", made["reference/commands.md"], re.M))
    verbs = {f"{command} {verb}" for command, found in find_verbs().items() for verb in found}
    assert len(verbs) > 20 and asked == {*COMMANDS, *verbs}


def test_exit_codes_are_written_up(made: dict[str, str]) -> None:
    found = set(re.findall(r"^\| (\d+) \|", made["reference/exit-codes.md"], re.M))
    written = set(re.findall(r"^\| (\d+) \|", (DOCS / "USE.md").read_text(), re.M))
    assert found == {"2", "93", "94", "95"} and found <= written


def test_every_diagram_is_drawn() -> None:
    drawn = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("figures/mermaid-*.svg")}
    assert drawn == find_diagrams().keys(), "python -m tests.mermaid_figures mermaid.min.js"
    assert not [name for name in drawn if "foreignObject" in (DOCS / name).read_text()], "no image shows these"


def test_links_are_adapted() -> None:
    text = "[a](docs/USE.md#x) [b](README.md) [c](LICENSE) [d](https://a.b/c) [e](#f) [tests](tests)"
    site = "[a](USE.md#x) [b](index.md) c (`LICENSE`) [d](https://a.b/c) [e](#f) tests"
    assert adapt_links(text, ROOT) == site
    assert adapt_links("[a](USE.md) [b](../examples/gpt.py)", DOCS) == "[a](USE.md) b (`examples/gpt.py`)"


def test_lists_are_adapted() -> None:
    text = "1. a\n   * b\n\n       code\n         more\n\n2. c\n\n    plain\n      * kept\n"
    assert adapt_lists(text) == "1. a\n    * b\n\n        code\n          more\n\n2. c\n\n    plain\n      * kept\n"


@pytest.mark.slow
def test_the_site_is_built_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="no mkdocs: the site is not built")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    pages = {page.relative_to(tmp_path): page.read_text() for page in tmp_path.glob("**/*.html")}
    assert len(pages) > 40
    assert [page for page, text in pages.items() if FETCHED.search(text) or 'class="mermaid"' in text] == []
