"""The web page as a real `holdfast dash` serves it to a real browser, from a journal with hostile texts."""

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.action import Action, Launch
from holdfast.model.decider_events import Progress, Ready
from holdfast.model.detector_alarm import Alarm
from holdfast.model.journal_entry import Entry
from tests.core.test_page_view import simulated

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def hostile(entry: Entry) -> Entry:
    """The same entry with a node, an alarm and evidence that a page must not obey, with losses and
    tokens, and with a second release from the second launch on."""
    actions = tuple(renewed(action) for action in entry.decision.actions)
    entry = msgspec.structs.replace(entry, decision=msgspec.structs.replace(entry.decision, actions=actions))
    match entry.event:
        case Ready(node="n0"):
            return msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, host=HOSTILE))
        case Alarm() as alarm:
            said = msgspec.structs.replace(alarm, reason=f"says {HOSTILE}", evidence=(HOSTILE, "\x1b[31mred\u202e"))
            return msgspec.structs.replace(entry, event=said)
        case Progress(step=step) as progress:
            told = msgspec.structs.replace(progress, loss=9.0 / (step + 1), tokens=1000.0 * step)
            return msgspec.structs.replace(entry, event=told)
    return entry


def renewed(action: Action) -> Action:
    """A launch after the first one with another release."""
    if not isinstance(action, Launch) or action.generation == 1:
        return action
    return msgspec.structs.replace(action, release=msgspec.structs.replace(action.release, number=2))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return write_journal(tmp_path / "journal.db", map(hostile, simulated()))


def write_journal(path: Path, entries: Iterable[Entry]) -> Path:
    with contextlib.closing(SqliteJournal(path)) as written:
        for entry in entries:
            written.append(entry, durable=False)
    return path


def watch_faults(page: Any) -> list[str]:
    """What goes wrong in the page's script from now on."""
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    return faults


def open_view(page: Any, address: str, view: str) -> None:
    page.goto(address)
    page.wait_for_selector("h1", timeout=60_000)
    page.evaluate(f"location.hash = '#/{view}'")
    page.wait_for_selector(f'nav a[data-view="{view.partition("/")[0]}"][aria-current="page"]')
    page.wait_for_selector("ol.story li" if "/" in view else "main h1")
    draw_frames(page)


def draw_frames(page: Any) -> None:
    """Wait until what was changed is drawn."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def change_view(page: Any, change: Callable[[dict[str, Any]], object]) -> None:
    """Have the page get another view than its server sends: one of a live job, where there is only a journal."""

    def show(route: Any) -> None:
        answer = route.fetch()
        view = answer.json()
        change(view["sections"])
        route.fulfill(response=answer, json=view)

    page.route("**/view", show)


@contextlib.contextmanager
def served(journal: Path, files: int = 4096) -> Iterator[str]:
    """The address of a page that a real `holdfast dash` serves of a journal; it complains beside the journal."""
    with serving(str(journal), said=journal.parent / "stderr", files=files) as address:
        yield address


@contextlib.contextmanager
def serving(*shown: str, said: Path, files: int = 4096) -> Iterator[str]:
    """The address of a page that a real `holdfast dash` serves, which may open so many files."""
    limits = ["prlimit", f"--nofile={files}:{files}"]
    words = [*limits, sys.executable, "-m", "holdfast", "dash", *shown, "--no-open"]
    with (
        said.open("wb") as stderr,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=Path(__file__).parents[2]
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.fixture
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: the page is not tried in a browser")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium: the page is not tried in a browser")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


def find_barriers(page: Any, where: str) -> list[str]:
    """What axe-core has against the page as it stands: elements that somebody cannot read, name or reach."""
    found = find_spec("axe_core_python")
    assert found and found.submodule_search_locations, "playwright is there, but not axe-core-python"
    if not page.evaluate("'axe' in window"):
        page.evaluate((Path(found.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8"))
    said = page.evaluate("axe.run(document)")
    assert len(said["passes"]) > 10, "axe has looked at nothing"
    # What it could not decide counts too, but for colours that lie under other boxes, and signs that are no letters.
    open_ones = [one for one in said["incomplete"] if one["id"] != "color-contrast"]
    return [
        f"{where}: {one['id']} {node['target']}" for one in (*said["violations"], *open_ones) for node in one["nodes"]
    ]
