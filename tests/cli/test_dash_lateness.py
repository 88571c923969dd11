"""The grid of ranks, coloured by the time that each takes between collectives: for eyes, keys and screen readers."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.page_in_browser import find_barriers, served

# Eight ranks: the median, 12 percent longer, 50 or more, not known, 4 percent less, and three more at the median.
LATENESS = "lx9.hlll"
COLOURS = """(at) => {
  const canvas = document.querySelector("canvas"), pen = canvas.getContext("2d"), scale = devicePixelRatio || 1;
  return at.map(([x, y]) => [...pen.getImageData((x + 4) * scale, (y + 4) * scale, 1, 1).data].join(" "));
}"""


def show_lateness(page: Any, lateness: list[str]) -> None:
    def show(route: Any) -> None:
        answer = route.fetch()
        view = answer.json()
        view["sections"]["lateness"] = lateness
        route.fulfill(response=answer, json=view)

    page.route("**/view", show)


def open_ranks(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("h1", timeout=60_000)
    page.click('nav a[data-view="ranks"]')
    page.get_by_label("Colour by").select_option("late")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.e2e
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_grid_shows_who_takes_longer_between_collectives(journal: Path, browser: Any, scheme: str) -> None:
    faults: list[str] = []
    with served(journal) as address:
        page = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme).new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        show_lateness(page, [LATENESS])
        open_ranks(page, address)
        legend = page.locator("ul.legend li").all_inner_texts()
        assert legend == [
            "up to 2 % of the time longer than the median: 5",
            "8 to 14 %: 1",
            "30 % or more: 1",
            "not known: 1",
        ]
        heads = 17  # the name above each group of two ranks
        spots = [[(rank // 2) * (2 * 30 + 14) + (rank % 2) * 30, heads] for rank in range(8)]
        seen = page.evaluate(COLOURS, spots)
        assert len(set(seen)) == 4 and seen[0] == seen[4] == seen[7] and seen[1] != seen[2] != seen[3]

        page.focus("canvas")
        said = page.locator("[aria-live]")
        for words in (
            "takes 12 % of the time longer",
            "takes 50 % or more of the time longer",
            "rank 3 on",
            "takes 4 %",
        ):
            page.keyboard.press("ArrowRight")
            page.wait_for_function(
                "(words) => document.querySelector('[aria-live]').textContent.includes(words)", arg=words
            )
        assert re.search(r"\brank 4\b.*\b4 % .*\bless\b", said.first.inner_text())
        page.keyboard.press("Enter")
        assert re.search(r"\b4 % .*\bless\b", page.inner_text("dialog"))
        page.keyboard.press("Escape")
        assert find_barriers(page, "ranks by lateness") == []
    assert not faults


@pytest.mark.e2e
def test_the_grid_says_that_a_journal_alone_does_not_tell_it(journal: Path, browser: Any) -> None:
    with served(journal) as address:
        page = browser.new_page()
        open_ranks(page, address)
        [told] = page.locator("ul.legend li").all_inner_texts()
        assert told == "not known: 8; only the controller of a job that trains and reports collectives tells it"
