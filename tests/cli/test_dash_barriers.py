"""The web page for people who cannot see it well, or use no mouse: every view, by axe-core and by the Tab key."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.page_in_browser import find_barriers, served

VIEWS = ("now", "incidents", "incidents/1", "ranks", "timeline", "nodes", "releases", "settings")
# Elements that can be used and are seen, each by a number that it keeps.
REACHABLE = """() => [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")]
  .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.disabled)
  .map((one, n) => { one.dataset.tried = n; return `${n} ${one.outerHTML.slice(0, 90)}`; })"""
# Short words that are broken in two, as where a column is too narrow for them.
BROKEN = r"""() => [...document.querySelectorAll("label, th, td, dt, dd, h1, h2, nav a, button")].flatMap((one) => {
  const found = [], walk = document.createTreeWalker(one, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let node = walk.nextNode(); node; node = walk.nextNode())
    for (const { 0: word, index } of node.data.matchAll(/(?<!\w)\w{2,12}(?!\w)/g)) {
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) found.push(word);
    }
  return found;
})"""
FOCUSED = "document.activeElement?.dataset?.tried ?? ''"


def show_view(page: Any, view: str) -> None:
    page.evaluate(f"location.hash = '#/{view}'")
    page.wait_for_selector(f'nav a[data-view="{view.partition("/")[0]}"][aria-current="page"]')
    page.wait_for_selector("ol.story li" if "/" in view else "main h1")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it is drawn


LOGS = [
    {"rank": 2, "lines": ["out  step 176", "err  Segmentation fault"]},
    {"rank": 3, "absence": "it printed nothing"},
]
CHANGED = ["train.py (changed)", "@@ -1,3 +1,3 @@", " import torch", "-lr = 1", "+lr = 2"]


def show_live_run(page: Any) -> None:
    """Have the page believe that a controller takes orders, and that a run directory has logs and two releases: a
    journal alone has none of these."""

    def show(route: Any) -> None:
        answer = route.fetch()
        view = answer.json()
        view["sections"] |= {"orders_taken": True}
        view["sections"]["head"] |= {"over": False, "watched": True, "phase": "training"}
        view["sections"]["head"]["said"] = {"held": "ada", "asking": "may n1 be evicted?", "behind": "n2 is slow"}
        view["sections"]["nodes"][0][1] = "active"
        view["sections"]["releases"].append(view["sections"]["releases"][0] | {"number": 2})
        route.fulfill(response=answer, json=view)

    def tell(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"logs": LOGS})

    page.route("**/view", show)
    page.route("**/story/*", tell)
    page.route("**/release/2", lambda route: route.fulfill(json={"lines": CHANGED, "left_out": 3}))
    page.route("**/order", lambda route: route.fulfill(json={"seq": 1, "next": "n1 leaves now", "taken": False}))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_a_barrier(scheme: str, journal: Path, browser: Any) -> None:
    found = []
    with served(journal) as address:
        page = browser.new_context(color_scheme=scheme, viewport={"width": 1440, "height": 900}).new_page()
        show_live_run(page)
        page.goto(address)
        page.wait_for_selector("h1", timeout=60_000)
        for wide in (1440, 390):
            page.set_viewport_size({"width": wide, "height": 900})
            for view in VIEWS:
                show_view(page, view)
                found += find_barriers(page, f"{view} {wide}")
                taken = page.evaluate("document.documentElement.scrollWidth")
                found += [f"{view} takes {taken} of {wide} pixels"] if taken > wide else []
                found += [f"{view} {wide}: {name} is broken up" for name in page.evaluate(BROKEN)]
            show_view(page, "ranks")
            page.locator("main canvas").press("Enter")
            page.wait_for_selector("dialog pre:not(:text('…'))")
            found += find_barriers(page, f"a rank {wide}")
            page.keyboard.press("Escape")
            show_view(page, "nodes")
            page.locator("td button.plain").first.press("Enter")
            page.wait_for_selector("dialog p[role=status]")
            found += find_barriers(page, f"an order {wide}")
            page.keyboard.press("Escape")
            show_view(page, "releases")
            page.get_by_role("button", name="What changed since release 1").press("Enter")
            page.wait_for_selector("dialog pre .good")
            found += find_barriers(page, f"a release {wide}")
            page.keyboard.press("Escape")
    assert found == []


@pytest.mark.e2e
@pytest.mark.slow
def test_the_keyboard_reaches_everything_and_comes_back(journal: Path, browser: Any) -> None:
    with served(journal) as address:
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        show_live_run(page)
        page.goto(address)
        page.wait_for_selector("h1", timeout=60_000)
        for view in VIEWS:
            show_view(page, view)
            page.evaluate("document.activeElement.blur()")
            wanted, reached = page.evaluate(REACHABLE), set()
            for _ in range(len(wanted) + 2):  # one more is the browser's own, and one the beginning
                page.keyboard.press("Tab")
                reached.add(page.evaluate(FOCUSED))
            missed = [one for one in wanted if one.partition(" ")[0] not in reached]
            assert len(wanted) > 8 and missed == [], view
        show_view(page, "ranks")
        page.locator("main canvas").press("Enter")
        page.wait_for_selector("dialog")
        assert page.evaluate("document.querySelector('dialog').contains(document.activeElement)")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")
        assert page.evaluate("document.activeElement.tagName") == "CANVAS", "who closes a dialog is where he was"
