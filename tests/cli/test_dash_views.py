"""Views of the page in a real browser: nodes, the timeline, the first screen, orders, and a link that breaks."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast.model.stored_checkpoint_report import StorageReport
from tests.cli.page_in_browser import (
    change_view,
    draw_frames,
    find_barriers,
    open_view,
    served,
    write_journal,
)
from tests.cli.page_journals import TALL, WIDE, follow, open_page, told, view_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# --- nodes -------------------------------------------------------------------------------------------------------


def test_a_node_tells_its_probes_over_time_also_one_that_has_left(written: Path, browser: Any) -> None:
    known = {node.node: node for node in view_of(told()).nodes}
    probed = [node for node in known.values() if node.probes]
    assert {node.role for node in probed} >= {"active", "evicted", "ready"}
    with served(written) as address:
        page = open_page(browser, address, "nodes")
        for node in probed:
            page.get_by_role("button", name=node.node, exact=True).click()
            lines = page.locator("dialog ul.probes li")
            assert lines.count() == len(node.probes)
            for line, probe in zip(lines.all(), reversed(node.probes), strict=True):
                at = datetime.fromtimestamp(probe.at, UTC)
                assert f"{at:%H:%M:%S}" in line.inner_text() and probe.found in line.inner_text()
                assert (line.get_attribute("class") == "bad") is not probe.ok
            assert find_barriers(page, f"node {node.node}") == []
            page.keyboard.press("Escape")
            page.wait_for_selector("dialog", state="detached")


# --- time --------------------------------------------------------------------------------------------------------


def test_the_timeline_zooms_and_moves(written: Path, browser: Any) -> None:
    view = view_of(told())
    with served(written) as address:
        page = open_page(browser, address, "timeline")
        rows = page.locator("main table tbody tr")
        whole, every = shown_range(page), rows.count()
        assert every == len(view.spans)

        def act(how: str) -> tuple[str, str, str]:
            page.get_by_role("button", name=how, exact=True).click()
            return shown_range(page)

        close = act("Zoom in")
        assert close[0] > whole[0] and close[1] < whole[1] and close[2] != whole[2]
        assert act("Zoom in")[2] != close[2] and rows.count() < every
        middle = shown_range(page)
        assert act("Later")[0] > middle[0]
        assert act("Earlier") == middle
        assert act("Zoom out") == close
        assert act("Show all") == whole


def test_the_timeline_obeys_keys_the_wheel_and_the_pointer(written: Path, browser: Any) -> None:
    with served(written) as address:
        page = open_page(browser, address, "timeline")
        canvas, whole = page.locator("main canvas"), shown_range(page)
        canvas.focus()
        page.keyboard.press("+")
        draw_frames(page)
        close = shown_range(page)
        assert close[0] > whole[0] and close[1] < whole[1]
        page.keyboard.press("-")
        draw_frames(page)
        for key, undo in (("+", "-"), ("=", "-")):
            page.keyboard.press(key)
            draw_frames(page)
            assert shown_range(page) == close
            page.keyboard.press(undo)
            draw_frames(page)
            assert shown_range(page) == whole
        page.keyboard.press("+")
        page.keyboard.press("ArrowLeft")
        draw_frames(page)
        assert shown_range(page)[0] < close[0]
        page.keyboard.press("0")
        draw_frames(page)
        assert shown_range(page) == whole

        box = canvas.bounding_box()
        page.mouse.move(box["x"] + 1, box["y"] + 20)  # what is under the pointer stays there
        page.mouse.wheel(0, -300)
        draw_frames(page)
        page.wait_for_function(
            "(before) => document.querySelector('header .side').textContent !== before", arg=whole[2]
        )
        zoomed = shown_range(page)
        assert zoomed[0] == whole[0] and zoomed[1] < whole[1]
        page.mouse.move(box["x"] + 400, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 20, steps=4)
        page.mouse.up()
        draw_frames(page)
        assert shown_range(page)[0] > zoomed[0]


def test_the_timeline_shows_one_incident(written: Path, browser: Any) -> None:
    one = view_of(told()).incidents[1]
    with served(written) as address:
        page = open_page(browser, address, "timeline")
        page.get_by_label("Incident").select_option("2")
        draw_frames(page)
        first, last = (f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}" for at in (one.good_at, one.resumed_at))
        assert shown_range(page)[0] <= first and last <= shown_range(page)[1]
        assert page.locator("main table a").all_inner_texts().count("incident 2") > 2
        assert "incident 1" not in page.locator("main table a").all_inner_texts()


def shown_range(page: Any) -> tuple[str, str, str]:
    """From when until when the timeline shows, by the clock, and all that is said of it."""
    draw_frames(page)
    said = page.locator("section[aria-label=Timeline] header .side").inner_text()
    first, last = said.rpartition(",")[0].split(" to ")
    return first.split()[-1], last.split()[-1], said


# --- the first screen --------------------------------------------------------------------------------------------

LIVE = {"floor": 740, "copies": 2, "disk": 730, "behind": "n2 does not keep up"}
NOW = "training; every rank has made step 741"


def live(sections: dict[str, Any]) -> None:
    sections["head"] |= {"watched": True, "now": NOW, "said": LIVE}


def test_the_first_screen_answers_what_people_ask_first(tmp_path: Path, browser: Any) -> None:
    entries = list(told())
    follow(entries, StorageReport(step=700, at=entries[-1].at, missed=None))
    view = view_of(entries)
    head = view.head
    with served(write_journal(tmp_path / "journal.db", entries)) as address:
        page = browser.new_context(viewport={"width": WIDE, "height": TALL}, timezone_id="UTC").new_page()
        change_view(page, live)
        open_view(page, address, "now")
        state = page.locator("section.now")
        assert (
            state.locator(".pill").inner_text() == "Training"
            and state.locator(".lead").inner_text() == NOW.capitalize()
        )
        since = f"{datetime.fromtimestamp(head.since, UTC):%H:%M:%S}"
        assert head.recent_steps_s and head.pace and head.ettr is not None and head.hour_ettr is not None
        headline = state.locator("h1").inner_text()
        assert f"{head.step:,}" in headline and since in headline and rate(head.recent_steps_s) in headline
        tiles = {
            tile.locator("dt").inner_text(): tile.locator("dd").inner_text() for tile in page.locator(".tile").all()
        }
        assert len(tiles) == 4
        step, ettr, lost, incidents = tiles.values()
        assert f"{head.step:,}" in step and f"{rate(head.pace.steps / head.pace.seconds)}" in step
        assert f"{100 * head.ettr:.1f} %" in ettr and f"{100 * head.hour_ettr:.1f} %" in ettr
        assert f"{100 * head.lost_s / head.job_s:.1f} %" in lost and view.causes[0][0] in lost
        assert incidents.split()[0] == str(len(view.incidents))
        rows = page.locator("ul.causes li .row").all_inner_texts()
        assert [row.split("\n")[0].casefold() for row in rows] == [
            cause.casefold() for cause, s in view.causes if s > 0
        ][:7]
        assert page.locator("ul.causes .track i").first.bounding_box()["width"] > 0
        page.wait_for_selector("svg.chart path.curve")
        assert page.locator("svg.chart a").count() == len(view.incidents)

        page.click('nav a[data-view="releases"]')
        tiers = page.locator("section:has(h2:text('Checkpoints by tier'))")
        told_of = [fact.inner_text() for fact in tiers.locator(".facts dd").all()]
        assert [int(re.findall(r"\d+", fact)[0]) for fact in told_of] == [740, 730, 700]


def rate(steps_s: float) -> str:
    """As the page writes it."""
    return f"{float(f'{steps_s:.3g}'):g} steps/s" if steps_s >= 0.1 else f"{float(f'{1 / steps_s:.3g}'):g} s a step"


@pytest.mark.parametrize("may", [True, False])
def test_nobody_is_offered_what_he_may_not_order(may: bool, written: Path, browser: Any) -> None:
    def watched(sections: dict[str, Any]) -> None:
        live(sections)
        sections["orders_taken"] = may

    with served(written) as address:
        page = browser.new_context(viewport={"width": WIDE, "height": TALL}).new_page()
        change_view(page, watched)
        open_view(page, address, "nodes")
        offered = page.locator("#head button, main button:not(.name)").all_inner_texts()
        offered = [text for text in offered if text.isalpha()]
        assert offered[:2] == (["Hold", "Stop"] if may else []) and bool(offered[2:]) is may
        page.click('nav a[data-view="ranks"]')
        page.locator("main canvas").press("Enter")
        assert bool(page.locator("dialog button:not(:text('Close'))").count()) is may


# --- the link ----------------------------------------------------------------------------------------------------


def test_a_page_whose_connection_broke_comes_back_by_itself(tmp_path: Path, browser: Any) -> None:
    entries = told()
    path = write_journal(tmp_path / "journal.db", entries[:-1])
    with served(path) as address:
        page = browser.new_page()
        calls: list[str] = []

        def break_link(route: Any) -> None:
            calls.append(route.request.url)
            if len(calls) == 1:
                route.abort("connectionreset")
            elif len(calls) == 2:
                route.fulfill(status=200, body='{"version": 9, "chan')  # it ends in the midst of a line
            else:
                route.continue_()

        page.route("**/live?*", break_link)
        open_view(page, address, "ranks")
        assert page.locator("ul.legend li").all_inner_texts() == ["active 8"]
        for _ in range(600):
            if len(calls) >= 3:
                break
            page.wait_for_timeout(100)
        write_journal(path, entries[-1:])
        page.wait_for_selector("ul.legend li:nth-child(2)", timeout=60_000)
        assert page.locator("ul.legend li").all_inner_texts() == ["active 7", "named in a hang alarm 1"]
        assert len(calls) == 3 and page.locator("[role=alert]").count() == 0
