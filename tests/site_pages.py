"""What the documentation site has beyond docs/*.md: pages made from code and README, and figures without a CDN.

`make site` gives this file to mkdocs as a hook; mkdocs.yml has the order of pages.
"""

import contextlib
import hashlib
import inspect
import io
import os
import re
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import msgspec

from holdfast.cli.command_dispatch import COMMANDS
from holdfast.cli.terminal.prepared_help import load_command_lines, print_help
from holdfast.config import Settings
from holdfast.controller.metrics import METRICS
from holdfast.model.action import Action
from holdfast.model.decider_events import Event
from holdfast.model.detector_alarm import Kind

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
EXIT_CODE = re.compile(r"^[A-Z_]+ = (\d+)  # exit code(?::| of) (.+)", re.M)
FIELD = re.compile(r"^    (\w+): ([^=#\n]+?)(?: = [^#\n]*?)?(?:  # (.+))?$", re.M)  # with the reason beside it
NESTED = re.compile(r"^ {2,3}(?=\* )", re.M)
LISTED_CODE = re.compile(r"(?<=\n\n)( {6,7})(?=\S).*(?:\n {6}.*)*")
Rows = Iterator[tuple[str, ...]]


def make_pages() -> dict[str, str]:
    """Every page that is no file of docs/, by its path on the site."""
    pages = {new: adapt_links((ROOT / old).read_text(), ROOT) for old, new in MOVED.items()}
    made = {
        "commands": f"# Commands\n\nWhat each command says when asked for `--help`.\n{''.join(command_parts())}",
        "settings": page_of("Settings by name", "[SETTINGS.md](../SETTINGS.md) says how to set them.", setting_rows()),
        "events": f"# Events and actions\n\n[The journal](../JOURNAL.md) says how they go together.\n{event_parts()}",
        "failures": f"# Alarms and failures\n{failure_parts()}",
        "metrics": page_of("Metrics by name", "[METRICS.md](../METRICS.md) says more.", metric_rows()),
        "exit-codes": page_of("Exit codes", f"Those that decisions lead to. {_OTHERS}", code_rows()),
    }
    return pages | {f"reference/{name}.md": text for name, text in made.items()}


_OTHERS = "[All of them](../USE.md#restarts-and-exit-codes), with 0, 1, 2 and the script's own."


def page_of(title: str, text: str, rows: Rows) -> str:
    return f"# {title}\n\n{text}\n\n{table_of(rows)}"


def table_of(rows: Rows) -> str:
    """A table whose first row is its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|---" * (lines[0].count(" | ") + 1) + "|")
    return "\n".join(lines) + "\n"


def command_parts() -> Iterator[str]:
    for command, verbs in find_verbs().items():
        yield f"\n## {command}\n\nTo {COMMANDS[command]}.\n"
        for words in ([command], *([command, verb] for verb in verbs)):
            yield f"\n```text\n$ holdfast {' '.join(words)} --help\n{help_of(words)}\n```\n"


def find_verbs() -> dict[str, list[str]]:
    """The verbs of every command; most have none."""
    lines = load_command_lines()
    rows = {command: lines[command].get("rows", ()) for command in COMMANDS}
    return {command: [verb for row in found for verb in row.get("verbs", ())] for command, found in rows.items()}


def help_of(words: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text, mock.patch.dict(os.environ, COLUMNS="100"):
        print_help(words[0], [*words[1:], "--help"])
    return text.getvalue().rstrip()


def setting_rows() -> Rows:
    yield ("setting", "type", "default", "explained in")
    places = explained_in()
    for name, kind, value in leaves_of(Settings()):
        yield (f"`{name}`", kind, default_text(value), places.get(name, ""))


def default_text(value: Any) -> str:
    if value in ("", None, ()):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else str(value).removesuffix('.0')}`"


def leaves_of(settings: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, msgspec.Struct):
            yield from leaves_of(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, kind_of(field.type), value


def kind_of(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(f"`{choice.value}`" for choice in kind)
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).partition("[")[0]


def explained_in() -> dict[str, str]:
    """A link to the section that has the item of a setting."""
    found = {}
    for page in sorted(DOCS.glob("*.md")):
        head = ""
        for line in page.read_text().splitlines():
            head = line.lstrip("# ") if line.startswith("#") else head
            if item := re.match(r"\* `(\w+\.\w+)` \(", line):
                found[item[1]] = f"[{head}](../{page.name}#{anchor_of(head)})"
    return found


def anchor_of(heading: str) -> str:
    """The anchor that GitHub, and this site, give to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def event_parts() -> str:
    parts = []
    for title, union in (("Events", Event), ("Actions", Action)):
        parts.append(f"\n## {title}\n")
        for struct in get_args(union):
            fields = FIELD.findall(inspect.getsource(struct))
            items = "".join(f"* `{name}` ({kind}){why and ': '}{why}\n" for name, kind, why in fields)
            parts.append(f"\n### {struct.__name__}\n\n{inspect.cleandoc(str(struct.__doc__))}\n\n{items}")
    return "".join(parts)


def failure_parts() -> str:
    kinds = "".join(f"* [`{kind}`](../RUNBOOK.md#{kind})\n" for kind in Kind)
    classes = tomllib.loads((ROOT / "holdfast/core/catalog/words/classes.toml").read_text())["klass"]
    rows = ((f"`{row['klass']}`", row["title"], row["group"], f"`{row['action']}`", row["hint"]) for row in classes)
    head = ("class", "what it is", "whose fault", "what to do", "in words")
    text = f"`holdfast diagnose` finds these {len(classes)}: [how](../DIAGNOSE.md)."
    return f"\n## Kinds of alarms\n\n{kinds}\n## Classes of failures\n\n{text}\n\n{table_of(iter([head, *rows]))}"


def metric_rows() -> Rows:
    yield ("metric", "type", "labels", "meaning")
    for name, row in METRICS.items():
        yield (f"`{name}`", row.kind, ", ".join(f"`{label}`" for label in row.labels), row.help)


def code_rows() -> Rows:
    yield ("exit code", "meaning", "in")
    found = {
        (code, meaning, path.relative_to(ROOT).as_posix())
        for path in (ROOT / "holdfast/core").rglob("*.py")
        for code, meaning in EXIT_CODE.findall(path.read_text())
    }
    yield from ((code, meaning, f"`{path}`") for code, meaning, path in sorted(found))


def adapt_links(text: str, folder: Path) -> str:
    """The text with links that hold on the site; what is not there is named instead."""

    def adapt(link: re.Match[str]) -> str:
        name, mark, anchor = link[2].partition("#")
        path = (folder / name).resolve()
        if not name or ":" in name or not path.is_relative_to(ROOT):
            return link[0]
        inside = path.relative_to(ROOT).as_posix()
        if inside in MOVED or DOCS in path.parents:
            return f"[{link[1]}]({MOVED.get(inside) or path.relative_to(DOCS).as_posix()}{mark}{anchor})"
        return link[1] if inside in link[1] else f"{link[1]} (`{inside}`)"

    return LINK.sub(adapt, text)


def figure_of(diagram: str) -> str:
    """The name of the figure that was drawn of a mermaid diagram: it follows from the text, so no figure is stale."""
    return f"figures/mermaid-{hashlib.sha256(diagram.encode()).hexdigest()[:12]}.svg"


def find_diagrams() -> dict[str, str]:
    """The mermaid diagrams of all pages by the names of their figures."""
    texts = (page.read_text() for page in sorted(DOCS.glob("*.md")))
    return {figure_of(diagram): diagram for text in texts for diagram in MERMAID.findall(text)}


def adapt_lists(text: str) -> str:
    """The text with lists and code in lists indented by four more columns, as mkdocs wants it; GitHub takes less."""

    def indent(code: re.Match[str]) -> str:
        return re.sub("^", " " * (8 - len(code[1])), code[0], flags=re.M)

    return LISTED_CODE.sub(indent, NESTED.sub("    ", text))


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs: add our pages to those of docs/."""
    from mkdocs.structure.files import File

    for path, text in make_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    drawn = MERMAID.sub(lambda found: f"![{page.title}: a diagram]({figure_of(found[1])})", markdown)
    return adapt_lists(adapt_links(drawn, DOCS) if page.file.generated_by is None else drawn)
