"""Holds the documents: what a person can set, run or meet in a journal is written up, and what is written is so."""

import ast
import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest

from tests.module_map import render_map
from tests.site_pages import find_verbs

Helps = dict[tuple[str, str], str]  # by command and verb

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

WIDTH = 110  # columns of a line of text
LINK = re.compile(r"\]\(<?([^)>\s]+)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
COMMAND = re.compile(r"^(?:\w*\$ )?(?:\w+=\S+ )*holdfast ([a-z]+)(.*)")
SPAN = re.compile(r"`([^`\n]+)`")
VERBS = find_verbs()  # each has flags of its own
# of python -m holdfast.chaos.matrix, of sbatch, of Megatron-LM
OTHERS_FLAGS = {"--cells", "--exclude", "--no-kill", "--ckpt-step", "--load", "--save"}
SHOWN_FILES = {"json.py", "msgspec.py", "script.py", "train.py"}  # of a user
MADE_UP = "tests/corpus/outside"  # logs whose users and homes nobody has
HOME = re.compile(rb"(?<![\w.~-])(/home/[\w.]|/Users/[\w.]|/root/[\w.]|[A-Z]:\\Users\\)")
LEFT_BY_TOOLS = {"__pycache__", "build", "dist", "runs", "node_modules"}


def unwritten(names: Iterable[str], pages: Iterable[Path]) -> list[str]:
    """The names that no page has as the first word of a `code` span."""
    text = "\n".join(page.read_text() for page in pages if page.exists())
    return [name for name in names if not re.search(rf"`{re.escape(name)}(?![\w.])", text)]


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub and GitLab give to the headings of a page."""
    heads = re.findall(r"^#+ +(.+)", FENCED.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def dead_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(page.read_text()):
        name, _, anchor = target.partition("#")
        to = page.parent / name if name else page
        if ELSEWHERE.match(target):
            continue
        if not to.exists() or (anchor and anchor not in anchors_of(to)):
            yield f"{page}: {target}"


def is_code(line: str) -> bool:
    """Whether the line is of an indented block, which may be as wide as what it shows."""
    return line.startswith("    ")


def wide_lines(page: Path) -> Iterator[str]:
    """Lines of text that are too wide; code, rows of tables and single words such as an address may be so."""
    for line in FENCED.sub("", page.read_text()).splitlines():
        if len(line) > WIDTH and not is_code(line) and not line.startswith("|") and " " in line.strip("* "):
            yield f"{page}: {line}"


def unknown_files(page: Path, known: Iterable[str]) -> list[str]:
    """Files of code and knowledge that a page names and that are not there; `known` are the paths of all that are."""
    found = sorted(set(re.findall(r"`([\w./]+\.py|\w[\w./]*/\w+\.toml)`", page.read_text())) - SHOWN_FILES)
    ends = {f"/{path}" for path in known}
    return [f"{page}: {name}" for name in found if not any(end.endswith(f"/{name}") for end in ends)]


class Typed(NamedTuple):
    """A command line of ours in a document."""

    command: str
    verb: str
    flags: tuple[str, ...]


def typed_commands(page: Path) -> Iterator[Typed]:
    """Command lines in blocks of code and in `code` spans."""
    text = page.read_text()
    blocks = (line.strip() for line in text.splitlines() if is_code(line))
    for line in (*blocks, *SPAN.findall(FENCED.sub("", text))):
        if found := COMMAND.match(line):
            words = re.split(r" +-- | +#|\S+\.py\b", found[2])[
                0
            ].split()  # what follows is of the script, or for people
            verb = words[0] if words and words[0] in VERBS.get(found[1], ()) else ""
            flags = (re.match(r"--?[a-z][a-z-]*", word.strip("[")) for word in words)
            yield Typed(found[1], verb, tuple(flag[0] for flag in flags if flag))


def named_flags(page: Path) -> set[str]:
    """Flags that are named alone, without their command: `--nnodes A:B`."""
    return {found[0] for span in SPAN.findall(page.read_text()) if (found := re.match(r"--[a-z][a-z-]+", span))}


def files(root: Path) -> Iterator[Path]:
    """What belongs to the repository, as far as one can tell without git."""
    for folder, names, found in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_BY_TOOLS and (name[0] != "." or name == ".ci")]
        yield from (Path(folder, name) for name in found)


def private_paths(root: Path) -> Iterator[str]:
    """Files that speak of somebody's home directory, or of the place where this checkout lies."""
    here = re.compile(rb"(?<![\w.~-])" + re.escape(bytes(root)) + rb"\b")
    for path in files(root):
        text = path.read_bytes()
        homes = None if root / MADE_UP in path.parents else HOME.search(text)
        found = homes or (len(root.parts) > 2 and here.search(text))
        if found:
            yield f"{path}: {found[0].decode()}"


def test_settings_are_written_up(setting_names: list[str]) -> None:
    assert unwritten(setting_names, PAGES) == []


def test_events_and_actions_are_written_up() -> None:
    from holdfast.model.action import Action
    from holdfast.model.decider_events import Event

    names = [struct.__name__ for struct in (*get_args(Action), *get_args(Event))]
    assert names
    assert unwritten(names, PAGES) == []


def test_detectors_are_written_up() -> None:
    found = (ROOT / "holdfast/core/detect").glob("*.py")
    assert unwritten(sorted(path.stem for path in found if path.stem[0] != "_"), PAGES) == []


def test_metrics_are_written_up() -> None:
    from holdfast.controller.metrics import METRICS

    page = ROOT / "docs/METRICS.md"
    assert unwritten(METRICS, [page]) == []
    named = {name for other in PAGES for name in re.findall(r"`(holdfast_\w+)\b(?!\.py)", other.read_text())}
    assert named - METRICS.keys() == set(), "there is no such metric"
    labels = dict(re.findall(r"^\* `(holdfast_\w+)(?:\{([\w,]+)\})?`", page.read_text(), re.M))
    assert labels == {name: ",".join(row.labels) for name, row in METRICS.items()}


def test_the_map_of_modules_is_of_these_modules() -> None:
    assert (ROOT / "docs/MODULES.md").read_text() == render_map(), "python -m tests.module_map > docs/MODULES.md"


def test_commands_are_written_up() -> None:
    from holdfast.cli.command_dispatch import COMMANDS

    assert COMMANDS
    assert unwritten([f"holdfast {name}" for name in COMMANDS], PAGES) == []


class Shown(NamedTuple):
    """A test of the ladder, or the row of a table that speaks of one."""

    name: str
    slow: bool
    path: str


def ladder_rows(page: Path) -> set[Shown]:
    """Items of the list in docs/LADDER.md: `the path` `the test`, and a dagger if the test is slow."""
    items = (" ".join(item.split()) for item in re.split(r"^\* ", page.read_text(), flags=re.M))
    named = (re.search(r"`([a-z ]+)` `(test_\w+)`( †)?$", item.partition(" A **chain**")[0]) for item in items)
    return {Shown(found[2], bool(found[3]), found[1]) for found in named if found}


def ladder_tests(folder: Path) -> set[Shown]:
    """Tests of the ladder, each with the path that it asserts."""
    return {
        Shown(node.name, "slow" in " ".join(map(ast.unparse, node.decorator_list)), path_of(node))
        for file in sorted(folder.glob("test_ladder_*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def path_of(test: ast.FunctionDef) -> str:
    asserted = re.search(r"\.path == '([^']*)'", ast.unparse(test))
    return asserted[1] if asserted else ""


def test_the_ladder_is_written_up() -> None:
    tests = ladder_tests(ROOT / "tests/cli")
    assert tests
    assert ladder_rows(ROOT / "docs/LADDER.md") == tests


def test_a_ladder_that_is_written_up_otherwise_is_seen(tmp_path: Path) -> None:
    test = "@pytest.mark.slow\ndef test_a(job):\n    assert climbed(job).path == 'launch end'\n"
    (tmp_path / "test_ladder_x.py").write_text(test)
    page = tmp_path / "LADDER.md"
    page.write_text("Text.\n\n* **No fault.** Nothing.\n  `launch end`\n  `test_a` †\n")
    assert ladder_rows(page) == ladder_tests(tmp_path) == {Shown("test_a", True, "launch end")}
    for wrong in ("* **No fault.** `launch end` `test_a`", "* **No fault.** `launch stop end` `test_a` †"):
        page.write_text(wrong)
        assert ladder_rows(page) != ladder_tests(tmp_path)


def test_links_lead_somewhere() -> None:
    assert [link for page in (*PAGES, ROOT / "CONTRIBUTING.md") for link in dead_links(page)] == []


def test_lines_are_not_too_wide() -> None:
    pages = [path for path in files(ROOT) if path.suffix == ".md"]
    assert pages
    assert [line for page in pages for line in wide_lines(page)] == []


def test_files_that_documents_name_are_there() -> None:
    known = [path.relative_to(ROOT).as_posix() for path in files(ROOT) if path.suffix in (".py", ".toml")]
    assert known
    assert [name for page in (*PAGES, ROOT / "CONTRIBUTING.md") for name in unknown_files(page, known)] == []


def test_benchmarks_are_written_up() -> None:
    names = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    written = re.findall(r"`make bench-([a-z_]+)`", (ROOT / "docs/BENCHMARKS.md").read_text())
    assert set(written) == names


def test_results_that_documents_and_prices_name_are_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"benchmarks/results/[\w.-]+\w", page.read_text())}
    told = [*PAGES, *(ROOT / "holdfast/sim").rglob("*.toml")]
    named |= {
        f"benchmarks/results/{name}" for page in told for name in re.findall(r"[a-z_-]+-\d{8}\.json", page.read_text())
    }
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_commands_in_documents_are_those_of_the_program(helps: Helps) -> None:
    typed = {command for page in PAGES for command in typed_commands(page)}
    assert typed
    assert [f"{c.command} {c.verb} {flag}" for c in sorted(typed) for flag in unknown_flags(c, helps)] == []


def test_flags_in_documents_are_those_of_the_program(helps: Helps) -> None:
    named = {flag for page in PAGES for flag in named_flags(page)}
    assert named
    assert [flag for flag in sorted(named - OTHERS_FLAGS) if not has_flag(" ".join(helps.values()), flag)] == []


@pytest.fixture(scope="module")
def helps() -> Helps:
    """What every command and verb says when asked for --help."""
    from holdfast.cli.command_dispatch import COMMANDS

    return {(name, verb): read_help(name, verb) for name in COMMANDS for verb in ("", *VERBS.get(name, ()))}


def read_help(*words: str) -> str:
    from holdfast.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as text, pytest.raises(SystemExit) as ended:
        raise SystemExit(main([*filter(None, words), "--help"]))
    assert ended.value.code == 0, words
    return text.getvalue()


def unknown_flags(typed: Typed, helps: Helps) -> list[str]:
    if (typed.command, typed.verb) not in helps:
        return ["no such command"]
    return [flag for flag in typed.flags if not has_flag(helps[typed.command, typed.verb], flag)]


def has_flag(text: str, flag: str) -> bool:
    return bool(re.search(rf"(?<![\w-]){flag}(?![\w-])", text))


def test_defaults_are_written_up() -> None:
    from holdfast.config import Settings

    pages = "\n".join((ROOT / "docs" / name).read_text() for name in ("SETTINGS.md", "PROBES.md", "REPLAY.md"))
    written = dict(re.findall(r"^\* `([\w.]+)` \(([^)]*)\)", pages, re.M))
    assert [name for name, value in defaults(Settings()) if not is_written(value, written.get(name, ""))] == []


def defaults(settings: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, msgspec.Struct):
            yield from defaults(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def is_written(value: Any, text: str) -> bool:
    """Whether the text in brackets begins with this default; what comes after a semicolon is for other cases."""
    word = text.partition(";")[0].strip("`")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return bool(re.fullmatch(r"[\d.]+", word)) and float(word) == value
    return word == (str(value).lower() if value or value is False else "none")


def test_the_glossary_is_in_order_and_has_no_word_that_is_not_used() -> None:
    glossary = ROOT / "docs/GLOSSARY.md"
    words = re.findall(r"^\* \*\*([^*]+)\*\*: ", glossary.read_text(), re.M)
    assert words == sorted(set(words), key=str.lower)
    texts = [path.read_text() for path in files(ROOT / "holdfast") if path.suffix == ".py"]
    texts += [page.read_text() for page in PAGES if page != glossary]
    assert unused_words(words, "\n".join(texts)) == []


def unused_words(words: Iterable[str], text: str) -> list[str]:
    """Words that the text has in no spelling: `write lane`, write_lane, WriteLane, write-lane; an ending may follow."""
    plain = " " + re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", text).lower()
    return [word for word in words if f" {word.lower().replace('-', ' ')}" not in plain]


def test_words_that_are_not_used_are_seen() -> None:
    words = ["write lane", "high-water mark", "fork server", "lot", "seat"]
    assert unused_words(words, "class WriteLane: high_water_mark; the fork\nservers, a slot") == ["lot", "seat"]


def test_no_private_paths() -> None:
    assert list(private_paths(ROOT)) == []


def test_gaps_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("Set `hang.limit_s` or `hang`; hear `Stop(nodes)`; say Tick; type `holdfast run FILE`.")
    names = ["hang.limit_s", "hang", "hang.limit", "Stop", "Tick", "holdfast run", "holdfast ru"]
    assert unwritten(names, [page, tmp_path / "missing.md"]) == ["hang.limit", "Tick", "holdfast ru"]


def test_dead_links_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("[a](a.md) [b](b.md) [d](https://example.org/d#d) ![f](f.png)")
    assert [link.split(": ")[1] for link in dead_links(page)] == ["b.md", "f.png"]


def test_dead_anchors_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# A job: `hold`\n\n```\n# no heading\n```\n\n[a](#a-job-hold) [b](a.md#no-heading) [c](#c)\n")
    assert [link.split(": ")[1] for link in dead_links(page)] == ["a.md#no-heading", "#c"]


def test_wide_lines_are_seen(tmp_path: Path) -> None:
    page, text = tmp_path / "a.md", "word " * 22 + "1"
    page.write_text(f"{text}\n\n    {text}\n\n```\n{text}\n```\n| {text} |\n* {'x' * 120}\n{text[:-1]}\n* {text}\n")
    assert [line.split(": ")[1] for line in wide_lines(page)] == [text, f"* {text}"]


def test_files_that_are_not_there_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("`core/a.py` `a.py` `train.py` `b.py` `re/a.py` `c.toml` `core/c.toml`")
    names = unknown_files(page, ["holdfast/core/a.py", "tests/c.py"])
    assert [name.split(": ")[1] for name in names] == ["b.py", "core/c.toml", "re/a.py"]


def test_commands_and_flags_are_seen(tmp_path: Path, helps: Helps) -> None:
    page = tmp_path / "a.md"
    lines = ["$ A=1 holdfast run --nnodes 2 --nodes 2 train.py --x", "holdfast sim dst --seeds 0:9 --seats 1 # --no"]
    text = ["holdfast none --at all, but `holdfast tell -w`", *(f"    {line}" for line in lines), "`--set A=1` `a --b`"]
    page.write_text("\n".join(text))
    typed = list(typed_commands(page))
    assert typed[0] == Typed("run", "", ("--nnodes", "--nodes"))
    assert [unknown_flags(one, helps) for one in typed] == [["--nodes"], ["--seats"], ["no such command"]]
    assert named_flags(page) == {"--set"}
    assert has_flag("-h, --help, --set KEY", "--set") and not has_flag("--settle", "--set")


@pytest.mark.parametrize(
    ("value", "text", "written"),
    [(2.0, "2", True), (2.0, "3; join 2", False), (60.0, "60; join 1800", True), (True, "true", True), (0, "", False)],
)
def test_defaults_that_differ_are_seen(value: Any, text: str, written: bool) -> None:
    assert is_written(value, text) is written


def test_private_paths_are_seen(tmp_path: Path) -> None:
    home = "/home" + "/me"  # in two parts, or this file would be found as well
    texts = {"a.py": f"{home}/x", "b.md": f"in {tmp_path}/b", "c.md": "usr/home/x ~/.cache /root", ".d/e": home}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(Path(fault.split(": ")[0]).name for fault in private_paths(tmp_path)) == ["a.py", "b.md"]
