"""A running job in the page of a real `holdfast dash`: it is held and resumed there, and a rank is looked at."""

import getpass
from typing import Any

import pytest

from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.model.decider_events import Order
from tests.cli.conftest import Start
from tests.cli.driver import Job
from tests.cli.page_in_browser import draw_frames, find_barriers, open_view, served, watch_faults

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG_MS = 120_000


def preview(job: Job, verb: str) -> str:
    """What the controller says that an order will do."""
    told: dict[str, Any] = ask_controller(job.run_dir, "/api/v1/orders/preview", {"verb": verb})
    return str(told["next"])


def press(page: Any, job: Job, verb: str) -> None:
    """Give an order as a person does: choose it, read what it will do, confirm."""
    before = len(job.events(Order))
    page.locator("#head").get_by_role("button", name=verb.capitalize(), exact=True).click()
    said = page.locator("dialog p[role=status]")
    said.wait_for(timeout=LONG_MS)
    assert preview(job, verb) in f"{said.inner_text()[:1].lower()}{said.inner_text()[1:]}"
    assert len(job.events(Order)) == before, "it was only asked"
    page.locator("dialog .choices").get_by_role("button", name=verb.capitalize(), exact=True).click()
    page.wait_for_selector("dialog", state="detached", timeout=LONG_MS)


def test_a_running_job_is_held_and_resumed_on_the_page(start: Start, browser: Any) -> None:
    job = start("--nnodes", "2", "--nproc-per-node", "2")
    job.trains()
    with served(job.run_dir) as address:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        faults = watch_faults(page)
        open_view(page, address, "now")
        page.wait_for_selector(".pill:text('Training')", timeout=LONG_MS)

        page.locator("#head").get_by_role("button", name="Stop", exact=True).click()
        page.wait_for_selector("dialog p[role=status]", timeout=LONG_MS)
        page.get_by_role("button", name="Close").click()  # who does not confirm has ordered nothing

        press(page, job, "hold")
        job.until(lambda: job.phase() == "held", "the job to be held")
        page.wait_for_selector(".pill:text('Held')", timeout=LONG_MS)
        assert getpass.getuser() in page.locator("[role=alert]").inner_text()

        press(page, job, "resume")
        job.trains(generation=2)
        page.wait_for_selector(".pill:text('Training')", timeout=LONG_MS)
        assert [(order.verb, order.who) for order in job.events(Order)] == [
            ("hold", getpass.getuser()),
            ("resume", getpass.getuser()),
        ]
        look_at_rank(page, job)
        page.click('nav a[data-view="now"]')
        job.finish()
        job.ends(0)
        page.wait_for_selector(".pill:text('Finished')", timeout=LONG_MS)
        assert faults == []


def look_at_rank(page: Any, job: Job) -> None:
    """One click to a rank: its node's beat, its step, its lines of output and its stack, of this moment."""
    page.click('nav a[data-view="ranks"]')
    page.wait_for_selector("main canvas")
    draw_frames(page)
    page.focus("main canvas")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    dialog = page.locator("dialog")
    assert dialog.get_attribute("aria-label") == "Rank 1"
    heard = dialog.get_by_role("region", name="Last heard of it").locator("dl")
    heard.wait_for(timeout=LONG_MS)
    facts = dict(zip(heard.locator("dt").all_inner_texts(), heard.locator("dd").all_inner_texts(), strict=True))
    beat_s = float(facts["Last beat of its node"].split()[0])
    step = int(facts["Step"].split()[0].rstrip(",").replace(",", ""))
    assert 0 <= beat_s < 60 and 0 < step <= job.status()["step"] + 1000 and float(facts["Loss"]) > 0
    stack = dialog.get_by_role("region", name="Its stack now").locator("pre")
    stack.wait_for(timeout=LONG_MS)
    assert "job.py" in stack.inner_text()
    page.get_by_role("button", name="Look at the stacks of all ranks now").click()
    flame = dialog.locator(".flame")
    flame.wait_for(timeout=LONG_MS)
    assert flame.get_attribute("data-ranks") == "4"
    assert find_barriers(page, "a live rank") == []
    page.keyboard.press("Escape")
