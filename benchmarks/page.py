"""The web page of a job of 16,384 ranks with a journal of 100,000 entries: until it is usable, and what it sends."""

import contextlib
import gzip
import importlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.table import Table

from benchmarks._report import Findings, brief, report
from holdfast.cli.page.page_sources import JournalSource
from holdfast.dash.page_feed import PageFeed
from holdfast.dash.page_source import JobPresence
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Progress
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.fault_source import NodeLoss, RankCrash
from holdfast.sim.job_world import SimSetup

NODES, NPROC, DAYS = 2048, 8, 0.05
FAULTS = ((1500.0, RankCrash(node="n1")), (2700.0, NodeLoss(node="n5")))
ENTRIES = 100_000
REFRESH_S, MINUTE_S = 2.0, 60.0
USABLE_GOAL_S, LIVE_GOAL_BYTES = 1.0, 100_000
LIMIT_MS = 120_000
WINDOW = {"width": 1440, "height": 900}
COLD = 5  # first screens, of which the median counts


def write_journal(path: Path) -> tuple[Entry, ...]:
    """An hour with two faults, then steady training until there are enough entries; returns the last of them."""
    found: list[Entry] = []
    simulate(SimSetup(seed=1, nodes=NODES, nproc=NPROC, standbys=20, days=DAYS, script=FAULTS), found.append)
    told = (n for n, entry in enumerate(found) if isinstance(entry.event, Progress))
    last = max(n for n in told if found[n].decision.phase is Phase.TRAINING)
    with contextlib.closing(SqliteJournal(path)) as journal:
        for entry in (*found[: last + 1], *steady(found[last], ENTRIES - last - 1)):
            journal.append(entry, durable=False)
    return tuple(steady(found[last], ENTRIES - last + 10))[-10:]


def steady(last: Entry, count: int) -> list[Entry]:
    assert isinstance(last.event, Progress)
    decision = msgspec.structs.replace(last.decision, actions=(), closed=None, changed=None, reason="")
    return [
        Entry(
            seq=last.seq + n,
            at=last.at + 10.0 * n,
            event=msgspec.structs.replace(
                last.event, step=last.event.step + n, at=last.at + 10.0 * n, loss=2.0 + 5.0 / n
            ),
            decision=decision,
        )
        for n in range(1, count + 1)
    ]


class LiveSource(JournalSource):
    """The journal as that of a live job: every ten seconds an entry, and a status whose steps go on."""

    def __init__(self, path: Path, later: tuple[Entry, ...]) -> None:
        super().__init__(path)
        self._later, self.now = later, later[0].at

    def read_entries(self, after: int) -> Any:
        yield from super().read_entries(after)
        yield from (entry for entry in self._later if entry.seq > max(after, ENTRIES) and entry.at <= self.now)

    def look_at_job(self) -> JobPresence:
        step = int(self.now)
        nodes = [
            {"node": f"n{n}", "role": "active", "step": step - (n == 7), "phase": "", "loss": 2.0} for n in range(NODES)
        ]
        now = f"training; every rank has made step {step - 1}"
        lateness = "".join(random.Random(step).choices("jklmn", k=NODES * NPROC))  # as noise makes it
        return JobPresence(
            status={"now": now, "step": step - 1, "nodes": nodes, "lateness": lateness}, now=self.now, may_order=True
        )


def measure_live(path: Path, later: tuple[Entry, ...]) -> tuple[float, int]:
    """Seconds that one refresh takes, and bytes that a page gets in a minute."""
    source = LiveSource(path, later)
    feed = PageFeed(source)
    while feed.behind:
        feed.refresh_view()
    version, began_at = feed.version, time.monotonic()
    for _ in range(int(MINUTE_S / REFRESH_S)):
        source.now += REFRESH_S
        feed.refresh_view()
    took_s = (time.monotonic() - began_at) / (MINUTE_S / REFRESH_S)
    return took_s, sum(len(patch) + len(b"data: \n\n") for patch in feed.patches_since(version) or ())


def measure_browser(path: Path) -> dict[str, float] | str:
    """Seconds until a real browser shows the first screen and the grid of ranks; a sentence where there is none."""
    program = shutil.which("chromium")
    try:
        sync_playwright = importlib.import_module("playwright.sync_api").sync_playwright
    except ImportError:
        return "playwright is not installed"
    if program is None:
        return "chromium is not installed"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        cold = [watch_cold(path, browser, lambda page, began_at: {}) for _ in range(COLD - 1)]
        seen = watch_cold(path, browser, watch_page)
    return seen | {"first_s": median(one["first_s"] for one in (*cold, seen))}


def watch_cold(path: Path, browser: Any, then: Callable[[Any, float], dict[str, float]]) -> dict[str, float]:
    """Seconds until a page that was never open shows its first screen, of a server that has just begun to read."""
    words = [sys.executable, "-m", "holdfast", "dash", str(path), "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            page = browser.new_page(viewport=WINDOW)
            address = server.stdout.readline().split()[-1]
            began_at = time.monotonic()
            page.goto(address)
            page.get_by_role("heading", level=1).wait_for(timeout=LIMIT_MS)
            found = {"first_s": time.monotonic() - began_at} | then(page, began_at)
            page.close()
            return found
        finally:
            server.terminate()


def watch_page(page: Any, began_at: float) -> dict[str, float]:
    """Seconds to each thing that a person waits for; `read_s` is since the first connection, the others are alone."""
    found = {}
    page.get_by_text("Reading the journal").wait_for(state="hidden", timeout=LIMIT_MS)
    found["read_s"] = time.monotonic() - began_at
    began_at = time.monotonic()
    page.reload()
    page.locator("svg.chart path.curve").wait_for(timeout=LIMIT_MS)
    found["usable_s"] = time.monotonic() - began_at
    began_at = time.monotonic()
    page.click('nav a[data-view="ranks"]')
    page.get_by_text(f"active {NODES * NPROC:,}").wait_for(timeout=LIMIT_MS)  # the legend is drawn after the cells
    found["ranks_s"] = time.monotonic() - began_at
    return found


def main() -> None:
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db"
        later = write_journal(path)
        feed, began_at = PageFeed(JournalSource(path)), time.monotonic()
        while feed.behind:
            feed.refresh_view()
        findings.figures["fold_s"] = time.monotonic() - began_at
        findings.figures["view_bytes"], findings.figures["view_gzip_bytes"] = (
            len(feed.whole),
            len(gzip.compress(feed.whole)),
        )
        findings.figures["file_bytes"] = len(feed.render().encode())
        findings.figures["refresh_s"], findings.figures["live_bytes_a_minute"] = measure_live(path, later)
        seen = measure_browser(path)
    if isinstance(seen, str):
        findings.skipped["browser"] = seen
    else:
        findings.figures |= seen
        findings.goals[f"first screen in {USABLE_GOAL_S:g} s, cold"] = seen["first_s"] < USABLE_GOAL_S
        findings.goals[f"usable in {USABLE_GOAL_S:g} s, once the journal is read"] = seen["usable_s"] < USABLE_GOAL_S
    live = findings.figures["live_bytes_a_minute"]
    findings.goals["less than 100 KB a minute"] = isinstance(live, int | float) and live < LIVE_GOAL_BYTES
    table = Table(title=f"{NODES * NPROC:,} ranks, {ENTRIES:,} entries")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in findings.figures.items():
        table.add_row(name, brief(float(value)) if name.endswith("_s") and value is not None else f"{value:,}")
    report("page", table, findings)


if __name__ == "__main__":
    main()
