"""Holds the documents: what a person can set, run or meet in a journal is written up, and links lead somewhere."""

import ast
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, get_args

from tests.module_map import render_map

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

LINK = re.compile(r"\]\(<?([^)>\s]+)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#")
HOME = re.compile(rb"(?<![\w.~-])(/home/[\w.]|/Users/[\w.]|/root/[\w.]|[A-Z]:\\Users\\)")
LEFT_BY_TOOLS = {"__pycache__", "build", "dist", "runs", "node_modules"}


def unwritten(names: Iterable[str], pages: Iterable[Path]) -> list[str]:
    """The names that no page has as the first word of a `code` span."""
    text = "\n".join(page.read_text() for page in pages if page.exists())
    return [name for name in names if not re.search(rf"`{re.escape(name)}(?![\w.])", text)]


def dead_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(page.read_text()):
        if not ELSEWHERE.match(target) and not (page.parent / target.split("#")[0]).exists():
            yield f"{page}: {target}"


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
        found = HOME.search(text) or (len(root.parts) > 2 and here.search(text))
        if found:
            yield f"{path}: {found[0].decode()}"


def test_settings_are_written_up(setting_names: list[str]) -> None:
    assert unwritten(setting_names, PAGES) == []


def test_events_and_actions_are_written_up() -> None:
    from holdfast.model.action import Action
    from holdfast.model.event import Event

    names = [struct.__name__ for struct in (*get_args(Action), *get_args(Event))]
    assert names
    assert unwritten(names, PAGES) == []


def test_detectors_are_written_up() -> None:
    found = (ROOT / "holdfast/core/detect").glob("*.py")
    assert unwritten(sorted(path.stem for path in found if path.stem[0] != "_"), PAGES) == []


def test_the_map_of_modules_is_of_these_modules() -> None:
    assert (ROOT / "docs/MODULES.md").read_text() == render_map(), "python -m tests.module_map > docs/MODULES.md"


def test_commands_are_written_up() -> None:
    from holdfast.cli import COMMANDS

    assert COMMANDS
    assert unwritten([f"holdfast {name}" for name in COMMANDS], PAGES) == []


class Shown(NamedTuple):
    """A test of the ladder, or the row of a table that speaks of one."""

    name: str
    slow: bool
    path: str


def ladder_rows(page: Path) -> set[Shown]:
    """Rows of the table in docs/LADDER.md: the path is the second column, the test the last; a dagger: it is slow."""
    cells = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in page.read_text().splitlines()]
    named = [(row[1], re.fullmatch(r"`(test_\w+)`( †)?", row[-1])) for row in cells if len(row) > 2]
    return {Shown(found[1], bool(found[2]), path.strip("`")) for path, found in named if found}


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
    page.write_text("| fault | path | test |\n|---|---|---|\n| none | `launch end` | `test_a` † |\n")
    assert ladder_rows(page) == ladder_tests(tmp_path) == {Shown("test_a", True, "launch end")}
    for wrong in ("| none | `launch end` | `test_a` |", "| none | `launch stop end` | `test_a` † |"):
        page.write_text(wrong)
        assert ladder_rows(page) != ladder_tests(tmp_path)


def test_links_lead_somewhere() -> None:
    assert [link for page in (*PAGES, ROOT / "CONTRIBUTING.md") for link in dead_links(page)] == []


def test_no_private_paths() -> None:
    assert list(private_paths(ROOT)) == []


def test_gaps_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("Set `hang.limit_s` or `hang`; hear `Stop(nodes)`; say Tick; type `holdfast run FILE`.")
    names = ["hang.limit_s", "hang", "hang.limit", "Stop", "Tick", "holdfast run", "holdfast ru"]
    assert unwritten(names, [page, tmp_path / "missing.md"]) == ["hang.limit", "Tick", "holdfast ru"]


def test_dead_links_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("[a](a.md) [b](b.md) [c](#c) [d](https://example.org/d) [e](a.md#e) ![f](f.png)")
    assert [link.split(": ")[1] for link in dead_links(page)] == ["b.md", "f.png"]


def test_private_paths_are_seen(tmp_path: Path) -> None:
    home = "/home" + "/me"  # in two parts, or this file would be found as well
    texts = {"a.py": f"{home}/x", "b.md": f"in {tmp_path}/b", "c.md": "usr/home/x ~/.cache /root", ".d/e": home}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(Path(fault.split(": ")[0]).name for fault in private_paths(tmp_path)) == ["a.py", "b.md"]
