"""Each view of the page in a real browser: what a person sees of ranks, nodes, stacks and time, and what clicks do."""

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.diagnose.stack_outline import outline_stacks
from holdfast.core.record.page_view import PageFold, PageView
from holdfast.model.action import Action, Launch, Probe
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.event import Begin, Decision, Entry, Event, Outcome, Phase, Progress, StorageReport
from holdfast.model.rank_traces import StackRow
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.job_world import SimSetup
from tests.cli.page_in_browser import (
    change_view,
    draw_frames,
    find_barriers,
    open_view,
    served,
    watch_faults,
    write_journal,
)
from tests.core.diagnose.places import REDUCE, SLEEP, process, trace
from tests.core.test_page_view import QUIET, simulated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MESH = (("pp", 2), ("dp", 2), ("tp", 2))
WIDE, TALL = 1440, 900
CELL, GAP, HEAD = 30, 14, 17  # of a grid of few ranks, in pixels
STACKS = outline_stacks(trace(*(process(rank, SLEEP if rank == 3 else REDUCE) for rank in range(8))), (3,))


def training(entries: Iterable[Entry]) -> list[Entry]:
    """These up to the last that tells of training."""
    found = list(entries)
    last = max(
        n for n, one in enumerate(found) if isinstance(one.event, Progress) and one.decision.phase is Phase.TRAINING
    )
    return found[: last + 1]


def generation_of(entries: list[Entry]) -> int:
    return max(a.generation for one in entries for a in one.decision.actions if isinstance(a, Launch))


def follow(entries: list[Entry], event: Event, *actions: Action) -> None:
    """Add an entry of a job that goes on as before."""
    last = entries[-1]
    decision = Decision(phase=last.decision.phase, actions=actions)
    entries.append(Entry(seq=last.seq + 1, at=last.at + 1.0, event=event, decision=decision))


def placed(entry: Entry) -> Entry:
    """The same entry of a job with a mesh, on nodes whose switches are known, whose alarms keep stacks."""
    event = entry.event
    match event:
        case Begin(job=job):
            event = msgspec.structs.replace(event, job=msgspec.structs.replace(job, mesh=MESH))
        case Alarm(stance=Stance.ACT):
            event = msgspec.structs.replace(event, stacks=STACKS)
    actions = tuple(
        msgspec.structs.replace(
            action,
            seats=tuple(
                msgspec.structs.replace(seat, near=("spine", f"leaf{seat.group_rank % 2}")) for seat in action.seats
            ),
        )
        if isinstance(action, Launch)
        else action
        for action in entry.decision.actions
    )
    return msgspec.structs.replace(
        entry, event=event, decision=msgspec.structs.replace(entry.decision, actions=actions)
    )


@cache
def told() -> tuple[Entry, ...]:
    """A job that trains: rank 3 is named in a hang, and nodes were probed, also a standby and one that was evicted."""
    entries = training(map(placed, simulated()))
    view = fold(entries).make_view(None)
    evicted = next(node.node for node in view.nodes if node.role == "evicted")
    standby = next((node.node for node in view.nodes if node.role == "ready"), evicted)
    for number, (node, found) in enumerate(((evicted, ""), (evicted, "memory differs"), (standby, ""), ("n1", ""))):
        follow(entries, entries[-1].event, Probe(id=9000 + number, generation=0, nodes=(node,), level=2))
        failed = {node: found} if found else {}
        follow(entries, Outcome(action=9000 + number, ok=True, failed=failed))
    hang = Alarm(
        kind=Kind.HANG,
        at=entries[-1].at,
        suspects=("n1",),
        ranks=(3,),
        generation=generation_of(entries),
        reason="keeps the others waiting",
        stance=Stance.NOTIFY,
        stacks=STACKS,
    )
    follow(entries, hang)
    return tuple(entries)


def fold(entries: Iterable[Entry]) -> PageFold:
    found = PageFold()
    for entry in entries:
        found.add(entry)
    return found


def view_of(entries: Iterable[Entry]) -> PageView:
    return fold(entries).make_view(None)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_journal(tmp_path / "journal.db", told())


def open_page(browser: Any, address: str, view: str) -> Any:
    page = browser.new_context(viewport={"width": WIDE, "height": TALL}, timezone_id="UTC").new_page()
    open_view(page, address, view)
    return page


COLOUR = """([x, y]) => {
  const canvas = document.querySelector("canvas"), pen = canvas.getContext("2d"), scale = devicePixelRatio || 1;
  return [...pen.getImageData(x * scale, y * scale, 1, 1).data].join(" ");
}"""


def colours(page: Any, spots: Iterable[tuple[float, float]]) -> list[str]:
    return [page.evaluate(COLOUR, list(spot)) for spot in spots]


def spot_of(rank: int, size: int) -> tuple[int, int]:
    """Where the cell of a rank begins, of groups of so many."""
    return (rank // size) * (size * CELL + GAP) + (rank % size) * CELL, HEAD


# --- stacks ------------------------------------------------------------------------------------------------------


def test_the_story_of_a_hang_shows_where_all_ranks_were(written: Path, browser: Any) -> None:
    with served(written) as address:
        page = open_page(browser, address, "incidents/1")
        faults = watch_faults(page)
        flame = page.locator("ol.story .flame").first
        assert flame.is_visible() and flame.get_attribute("data-ranks") == "8"
        places = page.locator("ol.story .places").first.locator("li")
        wait, sleep = STACKS[3], STACKS[4]
        assert places.all_inner_texts() == [f"Rank 3 {sleep.frame}", f"Ranks 0-2, 4-7 {wait.frame}"]
        assert "bad" in (places.first.get_attribute("class") or ""), "whom the others wait for comes first"
        boxes = {box.inner_text(): box.bounding_box() for box in flame.locator(".frame").all()}
        assert len(boxes) == len(STACKS)

        def box(row: StackRow) -> dict[str, float]:
            return next(at for text, at in boxes.items() if text.startswith(row.frame))

        assert box(wait)["width"] == pytest.approx(7 * box(sleep)["width"], rel=0.05)
        assert box(wait)["y"] < box(STACKS[0])["y"], "the innermost is on top"
        assert flame.locator(".frame.named").all_inner_texts() == [f"{sleep.frame} · rank 3"]
        page.set_viewport_size({"width": 390, "height": 800})
        draw_frames(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390 and places.first.is_visible()
        assert find_barriers(page, "a story with stacks") == [] and faults == []


def test_a_mailed_story_has_the_stacks(written: Path, browser: Any, tmp_path: Path) -> None:
    from holdfast.cli.page.page_sources import JournalSource
    from holdfast.dash.page_feed import PageFeed

    (tmp_path / "run.html").write_text(PageFeed(JournalSource(written)).render(), encoding="utf-8")
    page = browser.new_page()
    page.goto(f"{(tmp_path / 'run.html').as_uri()}#/incidents/1")
    page.wait_for_selector("ol.story .flame", timeout=60_000)
    assert page.locator("ol.story .places li").first.inner_text().startswith("Rank 3 ")


# --- the grid ----------------------------------------------------------------------------------------------------


def test_a_rank_that_an_alarm_names_has_the_state_in_its_own_cell(written: Path, browser: Any) -> None:
    with served(written) as address:
        page = open_page(browser, address, "ranks")
        corners = colours(page, [(x + 4, y + 4) for x, y in (spot_of(rank, 2) for rank in range(8))])
        assert len(set(corners)) == 2 and [n for n, one in enumerate(corners) if corners.count(one) == 1] == [3]
        middle = CELL // 2
        inside = colours(page, [(x + middle, y + middle) for x, y in (spot_of(rank, 2) for rank in (2, 3))])
        assert inside[0] == corners[2] and inside[1] != corners[3], "and not by its colour alone"
        assert page.locator("ul.legend li").all_inner_texts() == ["active 7", "named in a hang alarm 1"]
        x, y = spot_of(3, 2)
        page.locator("canvas").click(position={"x": x + 10, "y": y + 10})
        dialog = page.locator("dialog")
        assert dialog.get_attribute("aria-label") == "Rank 3" and "keeps the others waiting" in dialog.inner_text()
        page.keyboard.press("Escape")
        x, y = spot_of(2, 2)
        page.locator("canvas").click(position={"x": x + 10, "y": y + 10})
        facts = page.locator("dialog > .facts").inner_text()
        assert dialog.get_attribute("aria-label") == "Rank 2" and "Named in" not in facts


ORDERS = {
    "node": [0, 1, 2, 3, 4, 5, 6, 7],
    "dim0": [0, 4, 1, 5, 2, 6, 3, 7],  # pp: ranks that differ in the first dimension alone
    "dim1": [0, 2, 1, 3, 4, 6, 5, 7],
    "dim2": [0, 1, 2, 3, 4, 5, 6, 7],
    "near": [0, 1, 4, 5, 2, 3, 6, 7],  # seats 0 and 2 are on one switch, 1 and 3 on the other
}


def test_ranks_are_grouped_by_parallel_dimension_host_and_switch(written: Path, browser: Any) -> None:
    with served(written) as address:
        page = open_page(browser, address, "ranks")
        chooser = page.get_by_label("Group by")
        assert chooser.locator("option").all_inner_texts() == [
            "node",
            "host",
            "switch",
            "pp group",
            "dp group",
            "tp group",
        ]
        said = page.locator("#said")
        for group, ranks in ORDERS.items():
            chooser.select_option(group)
            draw_frames(page)
            size = 4 if group == "near" else 2
            ends = [(spot_of(n * size + size - 1, size)[0] + CELL + GAP / 2, HEAD + 4) for n in range(8 // size - 1)]
            assert all(one.endswith(" 0") for one in colours(page, ends)), f"{group}: groups stand apart"
            assert not any(
                one.endswith(" 0") for one in colours(page, [(spot_of(n, size)[0] + 4, HEAD + 4) for n in range(8)])
            )
            page.focus("canvas")
            page.keyboard.press("Home")
            seen = []
            for _ in ranks:
                seen.append(int(said.inner_text().split()[1]))
                page.keyboard.press("ArrowRight")
            assert seen == ranks, group
        chooser.select_option("host")
        draw_frames(page)
        assert colours(page, [(4, HEAD + 4)])[0].endswith(" 255")


NODES, NPROC = 2048, 8
BIG_CELL, BIG_GAP = 8, 3


@cache
def large() -> tuple[Entry, ...]:
    """16,384 ranks, of which one is named in a hang."""
    entries: list[Entry] = []
    simulate(SimSetup(seed=1, nodes=NODES, nproc=NPROC, days=0.01, rates=QUIET), entries.append)
    entries = training(entries)
    follow(
        entries,
        Alarm(
            kind=Kind.HANG,
            at=entries[-1].at,
            suspects=("n1543",),
            ranks=(12345,),
            generation=generation_of(entries),
            reason="keeps the others waiting",
            stance=Stance.NOTIFY,
        ),
    )
    return tuple(entries)


@pytest.mark.parametrize("wide", [WIDE, 390])
def test_a_cell_of_16384_opens_its_rank(wide: int, tmp_path: Path, browser: Any) -> None:
    with served(write_journal(tmp_path / "journal.db", large())) as address:
        page = browser.new_context(viewport={"width": wide, "height": TALL}).new_page()
        faults = watch_faults(page)
        open_view(page, address, "ranks")
        page.wait_for_selector("ul.legend li:nth-child(2)", timeout=60_000)
        assert page.locator("ul.legend li").all_inner_texts() == ["active 16,383", "named in a hang alarm 1"]
        canvas = page.locator("main canvas")
        across = canvas.evaluate("(canvas) => canvas.clientWidth")
        in_row = (across + BIG_GAP) // (NPROC * BIG_CELL + BIG_GAP)  # nodes

        def spot(rank: int) -> tuple[int, int]:
            line, place = divmod(rank // NPROC, in_row)
            return place * (NPROC * BIG_CELL + BIG_GAP) + rank % NPROC * BIG_CELL, line * (BIG_CELL + 1)

        ranks = (0, 7, 8, 5000, 12344, 12345, 12346, 16383)
        cells = colours(page, [(x + 1, y + 1) for x, y in map(spot, ranks)])
        assert len(set(cells)) == 2 and cells.count(cells[5]) == 1, "each is drawn, and the named one stands out"
        beyond = spot(16383)
        assert colours(page, [(beyond[0] + BIG_CELL + 1, beyond[1] + 1)])[0].endswith(" 0")
        for rank in ranks:
            x, y = spot(rank)
            canvas.click(position={"x": x + 4, "y": y + 4})
            assert page.locator("dialog").get_attribute("aria-label") == f"Rank {rank}"
            assert f"n{rank // NPROC}" in page.locator("dialog > .facts dd").all_inner_texts()
            page.keyboard.press("Escape")
        assert page.evaluate("document.documentElement.scrollWidth") <= wide and faults == []


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
        canvas, rows = page.locator("main canvas"), page.locator("main table tbody tr")
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

        canvas.focus()
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

        one = view.incidents[1]
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
        assert {f"{head.step:,}", since} <= set(state.locator("h1").inner_text().replace(",", " ,").split()) or (
            f"{head.step:,}" in state.locator("h1").inner_text() and since in state.locator("h1").inner_text()
        )
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
        assert [next(int(word) for word in fact.split() if word.isdigit()) for fact in told_of] == [740, 730, 700]


def rate(steps_s: float) -> str:
    """As the page writes it."""
    return f"{float(f'{steps_s:.3g}'):g} steps/s" if steps_s >= 0.1 else f"{float(f'{1 / steps_s:.3g}'):g} s a step"


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
        page.wait_for_function(
            "() => performance.getEntriesByType('resource').some((one) => one.name.includes('/live'))"
        )
        assert page.locator("ul.legend li").all_inner_texts() == ["active 8"]
        for _ in range(600):
            if len(calls) >= 3:
                break
            page.wait_for_timeout(100)
        write_journal(path, entries[-1:])
        page.wait_for_selector("ul.legend li:nth-child(2)", timeout=60_000)
        assert page.locator("ul.legend li").all_inner_texts() == ["active 7", "named in a hang alarm 1"]
        assert len(calls) == 3 and page.locator("[role=alert]").count() == 0
