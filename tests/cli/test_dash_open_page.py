"""A page that stays open while its job goes on: what somebody points at, has opened or looks at stays where it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.model.decider_events import Progress
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.model.stored_checkpoint_report import StorageReport
from tests.cli.page_in_browser import change_view, draw_frames, open_view, served, watch_faults, write_journal
from tests.cli.page_journals import TALL, WIDE, follow, generation_of, placed, told
from tests.core.test_page_view import simulated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FOCUSED = """(() => { const at = document.activeElement;
  return [at.tagName, at.getAttribute("href"), at.getAttribute("aria-label"), at.textContent.trim()].join("|"); })()"""

HEARD = """const parse = JSON.parse; window.patches = 0;
JSON.parse = (text) => { const found = parse(text); if (found?.changed) window.patches += 1; return found; };"""


def open_live(browser: Any, address: str, view: str) -> Any:
    """A page as of a live job, which counts the changes that it hears of."""
    page = browser.new_context(viewport={"width": WIDE, "height": TALL}, timezone_id="UTC").new_page()
    page.add_init_script(HEARD)
    change_view(page, watched)
    open_view(page, address, view)
    return page


def hear(page: Any, path: Path, entries: list[Entry], said: str) -> None:
    """The job goes on, and the page shows it."""
    before = page.evaluate("window.patches")
    go_on(path, entries, said)
    page.wait_for_function("(before) => window.patches > before", arg=before, timeout=60_000)
    draw_frames(page)


def go_on(path: Path, entries: list[Entry], said: str) -> None:
    """The job makes ten steps more, and an alarm says this of n1."""
    known, told_until = next(one.event for one in reversed(entries) if isinstance(one.event, Progress)), len(entries)
    at = entries[-1].at + 1.0
    follow(entries, msgspec.structs.replace(known, step=known.step + 10, at=at))
    alarm = Alarm(kind=Kind.SLOW, at=at, suspects=("n1",), generation=generation_of(entries), reason=said)
    follow(entries, msgspec.structs.replace(alarm, stance=Stance.NOTIFY))
    write_journal(path, entries[told_until:])


def watched(sections: dict[str, Any]) -> None:
    sections["head"] |= {"watched": True}
    sections["orders_taken"] = True


def newest_step(entries: list[Entry]) -> str:
    return f"{max(one.event.step for one in entries if isinstance(one.event, Progress)):,}"


NEWS: dict[str, Callable[[list[Entry]], str]] = {"now": newest_step, "nodes": lambda _: "a word that is new"}


@pytest.mark.parametrize(
    ("view", "chosen"),
    [
        ("now", "#head button:text-is('Hold')"),
        ("now", "a.times"),
        ("now", "svg.chart a >> nth=1"),
        ("now", "a:text-is('Read its story')"),
        ("nodes", "button[aria-label='Drain n2']"),
        ("nodes", "button.name:text-is('n1')"),
        ("timeline", "table a >> nth=3"),
        ("releases", "a[data-view=releases]"),
    ],
)
def test_the_focus_stays_where_it_is(view: str, chosen: str, tmp_path: Path, browser: Any) -> None:
    entries = list(told())
    path = write_journal(tmp_path / "journal.db", entries)
    with served(path) as address:
        page = open_live(browser, address, view)
        faults = watch_faults(page)
        page.wait_for_selector(chosen)
        page.locator(chosen).first.focus()
        before = page.evaluate(FOCUSED)
        page.evaluate("window.kept = document.activeElement")
        hear(page, path, entries, "a word that is new")
        if view in NEWS:
            assert NEWS[view](entries) in page.inner_text("main"), "the view has changed"
        assert not before.startswith("BODY") and page.evaluate(FOCUSED) == before
        if "Hold" in chosen:
            assert page.evaluate("window.kept.isConnected"), "a click that has begun would be lost"
        assert not faults


def test_a_timeline_at_its_end_follows_the_job_and_another_stays(tmp_path: Path, browser: Any) -> None:
    entries = list(told())
    path = write_journal(tmp_path / "journal.db", entries)
    with served(path) as address:
        page = open_live(browser, address, "timeline")
        first, last = shown_ends(page)
        hear(page, path, entries, "one")
        followed = shown_ends(page)
        assert followed[0] == first and followed[1] > last
        page.get_by_role("button", name="Zoom in", exact=True).click()  # into the middle
        middle = shown_ends(page)
        assert followed[0] < middle[0] and middle[1] < followed[1]
        assert middle[1] in page.inner_text("#said"), "who does not see it hears of it"
        hear(page, path, entries, "two")
        assert shown_ends(page) == middle


def shown_ends(page: Any) -> tuple[str, str]:
    draw_frames(page)
    said = page.locator("section[aria-label=Timeline] header .side").inner_text()
    first, last = said.rpartition(",")[0].split(" to ")
    return first.split()[-1], last.split()[-1]


def test_the_story_of_an_open_incident_changes_only_with_news(tmp_path: Path, browser: Any) -> None:
    entries = list(map(placed, simulated()))
    closed = [n for n, one in enumerate(entries) if one.decision.closed]
    upto = max(n for n in range(closed[-1]) if entries[n].decision.phase is Phase.LAUNCHING) + 1
    assert upto > closed[-2], "the last incident is open there"
    entries = entries[:upto]
    path = write_journal(tmp_path / "journal.db", entries)
    with served(path) as address:
        page = open_live(browser, address, f"incidents/{len(closed)}")
        page.wait_for_selector("main h2:has-text('is open')")
        stacks = page.locator("details:has(.flame)").first
        before = stacks.evaluate("(one) => one.open")
        stacks.locator("summary").first.click()
        lines = page.locator("ol.story > li").count()
        with page.expect_response("**/story/*", timeout=60_000):
            follow(entries, StorageReport(step=1, at=entries[-1].at, missed=None))
            write_journal(path, entries[-1:])
        draw_frames(page)
        assert stacks.evaluate("(one) => one.open") is not before, "what somebody has opened stays open"
        alarm = Alarm(
            kind=Kind.CRASH,
            at=entries[-1].at,
            suspects=("n1",),
            ranks=(3,),
            generation=generation_of(entries) - 1,
            reason="a word that is new",
        )
        follow(entries, alarm)
        write_journal(path, entries[-1:])
        page.wait_for_selector("ol.story:has-text('a word that is new')", timeout=60_000)
        assert page.locator("ol.story > li").count() > lines
