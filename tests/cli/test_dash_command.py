"""`holdfast dash` and `holdfast report --html`, as a person meets them in a terminal and in a real browser."""

import contextlib
import io
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec
import pytest

from holdfast.cli.commands import dash_command
from holdfast.cli.commands.report_command import render_report, strip_report
from holdfast.cli.commands.report_mailed_summary import write_summary
from holdfast.cli.page.page_sources import JournalSource
from holdfast.core.record.job_account import TimeUse
from holdfast.core.record.job_report import Report, report_of
from holdfast.core.record.ledger import fold_entries
from holdfast.core.record.release_pace import describe_paces
from holdfast.dash.page_feed import PageFeed
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Progress
from tests.cli.driver import until
from tests.cli.page_in_browser import HOSTILE, find_barriers, served
from tests.core.test_page_view import simulated

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def report(journal: Path) -> Report:
    with contextlib.closing(SqliteJournal(journal, read_only=True)) as written:
        return report_of(fold_entries(written.read()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing-here"], "is no run id"),
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
    assert dash_command.main([*(words if words[0] != "--port" else [str(journal), *words]), "--no-open"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("holdfast dash: ") and err.count("\n") == 1


def test_a_file_that_is_no_journal_is_one_sentence(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "no").write_text("this is no journal at all")
    assert dash_command.main([str(tmp_path / "no"), "--no-open"]) == 2
    assert "Traceback" not in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_the_mailed_file_runs_its_own_script_alone(journal: Path) -> None:
    written = PageFeed(JournalSource(journal)).render()
    assert written.count("<script") == 2  # its script, and what it shows
    assert HOSTILE not in written and "\\u003cscript>document.title" in written
    assert "\x1b" not in written and "\u202e" not in written
    assert not re.search(r'(src|href)="(?!#|data:)', written)
    assert "script-src 'sha256-" in written and "unsafe" not in written


MALFORMED = (
    b"GET /view HTTP/1.1\r\nHost: %b\r\nX-Holdfast-Page: \xff\xfe\r\n",
    b"GET /view HTTP/1.1\r\nHost: %b\r\nCookie: holdfast=\xff\r\n",
    b"GET / HTTP/1.1\r\nHost: \xff%b\r\n",
    b"GET /view HTTP/1.1\r\nHost: %b\r\nOrigin: \xff\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: %b\r\n",
    b"GET /%ff%fe HTTP/1.1\r\nHost: %b\r\n",
    b"GET /view HTTP/1.1\r\nHost: %b\r\nHost: evil\r\n",
    b"GET /view HTTP/1.1\r\nHost: %b\r\nX: " + b"a" * 100_000 + b"\r\n",
    b"GET /live?after=\xd9\xa3 HTTP/1.1\r\nHost: %b\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: %b\r\n",
    b"POST /enter HTTP/1.1\r\nHost: %b\r\nOrigin: http://%b\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /enter HTTP/1.1\r\nHost: %b\r\nOrigin: http://%b\r\nContent-Length: 2\r\n\r\n\xff\xff",
    b"nonsense\r\n",
)


def first_line(host: str, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), timeout=60) as link:
        link.sendall(request.replace(b"%b", host.encode()) + b"\r\n")
        return link.makefile("rb").readline()


@pytest.mark.e2e
def test_malformed_requests_and_idle_links_harm_nobody(journal: Path) -> None:
    with served(journal, files=512) as address, contextlib.ExitStack() as closing:
        host = urlsplit(address).netloc
        for request in MALFORMED:
            assert first_line(host, request)[9:10] == b"4", request
        for _ in range(540):  # more than it may open
            link = closing.enter_context(socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), 60))
            link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        for path in (b"/", b"/assets/page.js"):
            assert b" 200 " in first_line(host, b"GET " + path + b" HTTP/1.1\r\nHost: %b\r\n")
    said = (journal.parent / "stderr").read_text()
    assert "Traceback" not in said and len(said) < 20_000


@pytest.mark.e2e
def test_a_browser_shows_what_the_report_says(journal: Path, report: Report, browser: Any) -> None:
    faults: list[str] = []
    with served(journal) as address:
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.goto(address)
        page.wait_for_selector("h1", timeout=60_000)
        assert report.ettr is not None and len(describe_paces(report.paces)) == 3, "of two releases, and compared"
        shown = page.inner_text("main")
        assert f"{100 * report.ettr:.1f} %" in shown and f"{report.step:,}" in shown
        assert "code=" not in page.url
        assert page.locator("svg.chart path.curve").count() == 1 and page.locator("svg.chart a").count() == 2

        page.locator("svg.chart a").nth(1).press("Enter")  # from the curve to the story, by keyboard
        page.wait_for_selector("ol.story li")
        story = page.inner_text("main")
        assert page.locator("ul.undone li").count() or "Evicted n0" in story
        assert "<script>" in story and page.title() != "owned"  # shown, not obeyed

        for view in ("incidents", "ranks", "timeline", "nodes", "releases", "settings"):
            page.click(f'nav a[data-view="{view}"]')
            page.wait_for_selector(f'nav a[data-view="{view}"][aria-current="page"]')
            assert page.evaluate("document.activeElement.id") == "main"
            shown = page.inner_text("main")
            assert view != "releases" or all(pace in shown for pace in describe_paces(report.paces)), shown
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert find_barriers(page, "settings") == []

        again = browser.new_page()  # of a browser that was never there
        again.goto(address)
        again.wait_for_selector("text=this address has been used")
        page.reload()
        page.wait_for_selector("h1")
        tab = page.context.new_page()
        tab.goto(f"{address.partition('?')[0]}#/nodes")
        tab.wait_for_selector("table")  # another tab has told it the key
    assert not [fault for fault in faults if "403" not in fault], faults


@pytest.mark.e2e
@pytest.mark.slow
def test_an_open_page_hears_what_is_new(tmp_path: Path, browser: Any) -> None:
    path, entries = tmp_path / "journal.db", simulated()
    last = max(entry.event.step for entry in entries if isinstance(entry.event, Progress))
    with contextlib.closing(SqliteJournal(path)) as written:
        for entry in entries[: len(entries) // 2]:
            written.append(entry, durable=True)
        with served(path) as address:
            page = browser.new_page()
            page.goto(address)
            page.wait_for_selector("h1", timeout=60_000)
            assert f"{last:,}" not in page.inner_text("main")
            for entry in entries[len(entries) // 2 :]:
                written.append(entry, durable=True)
            page.wait_for_selector(f"main:has-text('{last:,}')", timeout=60_000)


class Thief(BaseHTTPRequestHandler):
    """Another user's server at another port of 127.0.0.1: what it sees of a browser that is led there."""

    saw: ClassVar[list[str]] = []
    aim = ""

    def do_GET(self) -> None:
        self.saw.append(str(self.headers))
        tries = ("view", "rank/0", "live?after=0")
        script = f"""
            const said = [document.cookie, JSON.stringify(sessionStorage), JSON.stringify(localStorage)];
            new BroadcastChannel("holdfast-page").postMessage("");
            new BroadcastChannel("holdfast-page").onmessage = (event) => said.push(event.data);
            const tries = {list(tries)}.map((path) => fetch("{self.aim}" + path, {{ credentials: "include" }})
              .then(async (answer) => said.push(await answer.text()), () => said.push("refused")));
            Promise.all(tries).then(() => fetch("/take")).then(() => setTimeout(() => {{
              document.title = "done"; document.body.textContent = said.join("|"); }}, 700));
        """
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<body><script>{script}</script>".encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.mark.e2e
def test_a_page_of_another_port_gets_nothing_that_it_can_use(journal: Path, browser: Any) -> None:
    with served(journal) as address, ThreadingHTTPServer(("127.0.0.1", 0), Thief) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Thief.aim = address.partition("?")[0]
        context = browser.new_context()
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("h1", timeout=60_000)
        other = context.new_page()
        other.goto(f"http://127.0.0.1:{server.server_port}/land")
        other.wait_for_function("document.title == 'done'", timeout=60_000)
        assert other.inner_text("body") == "|{}|{}|refused|refused|refused"
        assert len(Thief.saw) >= 2 and not any("holdfast" in seen or "Cookie" in seen for seen in Thief.saw)
        key = page.evaluate("sessionStorage.getItem('holdfast-page')")
        assert len(key) > 40 and not any(key in seen for seen in Thief.saw)
        server.shutdown()


@pytest.mark.e2e
@pytest.mark.parametrize("reader", [(True, 1440), (True, 390), (False, 1440), (False, 390)])
def test_a_mailed_file_is_read_where_no_script_runs(
    reader: tuple[bool, int], journal: Path, report: Report, browser: Any, tmp_path: Path
) -> None:
    styled, wide = reader
    records = [msgspec.structs.replace(one, cause=f"{one.cause} {HOSTILE}") for one in report.incidents]
    shown = strip_report(msgspec.structs.replace(report, incidents=tuple(records)))
    printed = render_report(shown, width=0)
    text = PageFeed(JournalSource(journal)).render(write_summary("run-1", shown, {TimeUse.TRAIN: 1.0}, printed))
    if not styled:  # as some readers of mail have it
        text = re.sub(r"<(script|style)\b.*?</\1>|<meta http-equiv[^>]*>", "", text, flags=re.S)
    (tmp_path / "run.html").write_text(text, encoding="utf-8")
    context = browser.new_context(java_script_enabled=False, viewport={"width": wide, "height": 900})
    page = context.new_page()
    faults: list[str] = []
    page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
    page.goto((tmp_path / "run.html").as_uri())
    said = page.inner_text("body")
    assert "run-1" in said and "Reading the journal" not in said
    assert records and all(one.cause in said for one in records), "hostile text is text"
    assert page.get_by_role("row").count() >= len(report.incidents) or wide < 640
    assert page.locator("main").bounding_box()["width"] <= wide and page.locator("img").count() == 0
    assert not faults
    context.close()


@pytest.mark.e2e
def test_a_mailed_file_shows_the_same_without_a_server(
    journal: Path, report: Report, browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "run.html").write_text(PageFeed(JournalSource(journal)).render(), encoding="utf-8")
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
