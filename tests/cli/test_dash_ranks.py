"""Ranks in a real browser: where they were in a hang, which of them is named, and how they are grouped, also 16,384."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.page.page_sources import JournalSource
from holdfast.dash.page_feed import PageFeed
from holdfast.model.detector_alarm import Alarm, Kind, Stance
from holdfast.model.journal_entry import Entry
from holdfast.model.rank_traces import StackRow
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.job_world import SimSetup
from tests.cli.page_in_browser import (
    draw_frames,
    find_barriers,
    open_view,
    served,
    watch_faults,
    write_journal,
)
from tests.cli.page_journals import STACKS, TALL, WAITED_FOR, WIDE, follow, generation_of, open_page, training, view_of
from tests.core.test_page_view import QUIET

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CELL, GAP, HEAD = 30, 14, 17  # of a grid of few ranks, in pixels

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
        assert dialog.get_attribute("aria-label") == "Rank 3" and WAITED_FOR in dialog.inner_text()
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
            reason=WAITED_FOR,
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

        seated = {node.first_rank // NPROC: node.node for node in view_of(large()).nodes}
        ranks = (0, 7, 8, 5000, 12344, 12345, 12346, 16383)
        cells = colours(page, [(x + 1, y + 1) for x, y in map(spot, ranks)])
        assert len(set(cells)) == 2 and cells.count(cells[5]) == 1, "each is drawn, and the named one stands out"
        beyond = spot(16383)
        assert colours(page, [(beyond[0] + BIG_CELL + 1, beyond[1] + 1)])[0].endswith(" 0")
        for rank in ranks:
            x, y = spot(rank)
            canvas.click(position={"x": x + 4, "y": y + 4})
            assert page.locator("dialog").get_attribute("aria-label") == f"Rank {rank}"
            assert seated[rank // NPROC] in page.locator("dialog > .facts dd").all_inner_texts()
            page.keyboard.press("Escape")
        assert page.evaluate("document.documentElement.scrollWidth") <= wide and faults == []
