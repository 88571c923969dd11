"""`holdfast dash` and `holdfast report --html`, as a person meets them in a terminal and in a real browser."""

import contextlib
import io
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.commands import dash
from holdfast.cli.page.page_sources import JournalSource
from holdfast.core.record.job_report import Report, report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.dash.page_feed import PageFeed
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.alarm import Alarm
from holdfast.model.event import Entry, Progress, Ready
from tests.cli.driver import until
from tests.core.test_page_view import simulated

Capture = pytest.CaptureFixture[str]
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def hostile(entry: Entry) -> Entry:
    """The same entry with a node, an alarm and evidence that a page must not obey, and with a loss."""
    match entry.event:
        case Ready(node="n0"):
            return msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, host=HOSTILE))
        case Alarm() as alarm:
            told = msgspec.structs.replace(alarm, reason=f"says {HOSTILE}", evidence=(HOSTILE, "\x1b[31mred\u202e"))
            return msgspec.structs.replace(entry, event=told)
        case Progress(step=step) as progress:
            return msgspec.structs.replace(entry, event=msgspec.structs.replace(progress, loss=9.0 / (step + 1)))
    return entry


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.db"
    with contextlib.closing(SqliteJournal(path)) as written:
        for entry in simulated():
            written.append(hostile(entry), durable=False)
    return path


@pytest.fixture
def report(journal: Path) -> Report:
    with contextlib.closing(SqliteJournal(journal, read_only=True)) as written:
        return report_of(fold_entries(written.read()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing-here"], "is not a run directory"),
        (["--port", "70000"], "--port must be"),
        (["http://127.0.0.1:1"], "--token-file"),
        (["http://127.0.0.1:1", "--token-file", "/nonexistent"], "No such file"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(
    words: list[str], said: str, journal: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(journal.parent))
    monkeypatch.setattr("sys.stdin", io.StringIO())  # no terminal
    assert dash.main([*(words if words[0] != "--port" else [str(journal), *words]), "--no-open"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("holdfast dash: ") and err.count("\n") == 1


def test_a_file_that_is_no_journal_is_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "no").write_text("this is no journal at all")
    assert dash.main([str(tmp_path / "no"), "--no-open"]) == 2
    assert "Traceback" not in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_the_mailed_file_runs_its_own_script_alone(journal: Path) -> None:
    written = PageFeed(JournalSource(journal)).write_file()
    assert written.count("<script") == 2  # its script, and what it shows
    assert HOSTILE not in written and "\\u003cscript>document.title" in written
    assert "\x1b" not in written and "\u202e" not in written
    assert not re.search(r'(src|href)="(?!#|data:)', written)
    assert "script-src 'sha256-" in written and "unsafe" not in written


@contextlib.contextmanager
def served(journal: Path) -> Iterator[str]:
    """The address of a page that a real `holdfast dash` serves."""
    words = [sys.executable, "-m", "holdfast", "dash", str(journal), "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
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


@pytest.mark.e2e
def test_a_browser_shows_what_the_report_says(journal: Path, report: Report, browser: Any) -> None:
    faults: list[str] = []
    with served(journal) as address:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.goto(address)
        page.wait_for_selector("h1", timeout=60_000)
        assert report.ettr is not None
        shown = page.inner_text("main")
        assert f"{100 * report.ettr:.1f} %" in shown and f"{report.step:,}" in shown
        assert "code=" not in page.url
        assert page.locator("svg.chart path.curve").count() == 1 and page.locator("svg.chart a").count() == 2

        page.locator("svg.chart a").nth(1).press("Enter")  # from the curve to the story, by keyboard
        page.wait_for_selector("ol.story li")
        story = page.inner_text("main")
        assert "What was not done" in story or "Evicted n0" in story
        assert "<script>" in story and page.title() != "owned"  # shown, not obeyed

        for view in ("incidents", "ranks", "timeline", "nodes", "releases", "settings"):
            page.click(f'nav a[data-view="{view}"]')
            page.wait_for_selector(f'nav a[data-view="{view}"][aria-current="page"]')
            assert page.evaluate("document.activeElement.id") == "main"
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390

        again = browser.new_page()
        assert again.goto(address).status == 403  # the code is used up, and this browser has no cookie
    assert not [fault for fault in faults if "403" not in fault], faults


@pytest.mark.e2e
def test_a_mailed_file_shows_the_same_without_a_server(
    journal: Path, report: Report, browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "run.html").write_text(PageFeed(JournalSource(journal)).write_file(), encoding="utf-8")
    faults: list[str] = []
    page = browser.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: faults.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None)
    page.goto(f"{(tmp_path / 'run.html').as_uri()}#/incidents/1")
    page.wait_for_selector("ol.story li", timeout=60_000)
    assert f"Incident 1: {report.incidents[0].label}" in page.inner_text("main")
    assert not faults and page.title() != "owned"
    assert until(lambda: page.evaluate("document.fonts.status") == "loaded", "the page")
