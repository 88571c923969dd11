"""Pictures of every view of the page, for eyes: `make page-pictures`.

Two jobs are shown, each 1440 and 390 pixels wide: a real one of eight ranks under chaos (a rank is killed, one is
stopped, a node is lost), while it runs and while an incident is open; and a simulated one of 16,384 GPUs. What looks
wrong in a picture is wrong for people: text that is cut, or runs over its box, or cannot be read at 390 pixels.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.sim.checked_seed_run import simulate
from holdfast.sim.job_world import SimSetup
from holdfast.wire.controller_request import ControllerNotRunning
from tests.cli.page_in_browser import draw_frames, open_view, served, write_journal

ROOT = Path(__file__).parents[2]
WIDTHS = (1440, 390)
VIEWS = ("now", "incidents", "ranks", "timeline", "nodes", "releases", "settings")
COLOURS = 255  # of a picture's palette; more are hard to tell apart
SCENARIO = """
patience_s = 300
[[fault]]
kind = "rank.kill"
rank = 2
at_step = 60
[[fault]]
kind = "rank.stop"
rank = 5
after_s = 20
[[fault]]
kind = "node.kill"
node = "n1"
after_s = 20
"""
HANG = 2  # the number of its incident
SIMULATED = SimSetup(seed=11, nodes=2048, nproc=8, standbys=24, days=7.0, progress_s=600.0)


class Album:
    """Takes pictures of pages, and keeps them in a folder."""

    def __init__(self, browser: Any, folder: Path, scheme: str) -> None:
        self._browser, self._folder, self._scheme = browser, folder, scheme

    def show(
        self, name: str, address: str, views: Iterable[str], *acts: tuple[str, str, Callable[[Any], None]]
    ) -> None:
        """Take pictures of these views, and of what is there after each act, which is a name, a view and a deed."""
        page = self._browser.new_context(color_scheme=self._scheme).new_page()
        first = True
        for wide in WIDTHS:
            page.set_viewport_size({"width": wide, "height": 900 if wide > 640 else 844})
            shown = [(view.replace("/", "-"), view, None) for view in views]
            for title, view, act in (*shown, *acts):
                if first:
                    open_view(page, address, view)
                    page.get_by_text("Reading the journal").wait_for(state="hidden", timeout=120_000)
                else:
                    go_to(page, view)
                first = False
                if act:
                    act(page)
                    page.wait_for_timeout(2500)  # what it asks for has come
                draw_frames(page)
                self._take(page, f"{name}-{title}-{wide}", whole=act is None)
                page.keyboard.press("Escape")
        page.context.close()

    def show_for_docs(self, address: str, incident: int) -> None:
        """Take the pictures that the documents show: the first screen, and the story of an incident without logs."""
        page = self._browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        open_view(page, address, "now")
        self._take(page, "page-now", whole=True)
        go_to(page, f"incidents/{incident}")
        last = page.locator("section.sheet").nth(1).bounding_box()
        page.set_viewport_size({"width": 1280, "height": int(last["y"] + last["height"] + 16)})
        self._take(page, "page-incident", whole=False)
        page.context.close()

    def _take(self, page: Any, name: str, *, whole: bool) -> None:
        path = self._folder / f"{name}.png"
        page.screenshot(path=path, full_page=whole)
        with Image.open(path) as picture:
            picture.convert("RGB").quantize(COLOURS, kmeans=1, dither=Image.Dither.NONE).save(path, optimize=True)
        print(path, flush=True)


def go_to(page: Any, view: str) -> None:
    page.evaluate(f"location.hash = '#/{view}'")
    page.wait_for_selector(f'nav a[data-view="{view.partition("/")[0]}"][aria-current="page"]')
    page.wait_for_selector("ol.story li" if "/" in view else "main h1")
    page.wait_for_timeout(300)


def open_rank(page: Any) -> None:
    page.focus("main canvas")
    page.keyboard.press("Enter")


def open_node(page: Any) -> None:
    page.locator("main button.name").first.click()


def ask_hold(page: Any) -> None:
    page.locator("#head").get_by_role("button", name="Hold", exact=True).click()


def look_at_all(page: Any) -> None:
    open_rank(page)
    page.get_by_role("button", name="Look at the stacks of all ranks now").click()
    page.wait_for_timeout(4000)
    page.locator("dialog .flame").scroll_into_view_if_needed()


@contextlib.contextmanager
def chaos_job(folder: Path, flags: list[str]) -> Iterator[Path]:
    """The run directory of a job that has come through the scenario, and trains."""
    run_dir = folder / "run"
    ranks = ["--nnodes", "4", "--nproc-per-node", "2", "--standbys", "2"]
    script = [
        str(ROOT / "examples" / "gpt.py"),
        "--steps",
        "1000000",
        "--ckpt",
        str(folder / "ckpt"),
        "--ckpt-every",
        "10",
    ]
    command = [sys.executable, "-m", "holdfast.cli"]
    (folder / "scenario.toml").write_text(SCENARIO)
    with (folder / "output").open("wb") as output:
        words = [*command, "run", "--run-dir", str(run_dir), *ranks, *flags, *script]
        job = subprocess.Popen(words, stdout=output, stderr=output, env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"})
        try:
            wait_for_training(run_dir)
            subprocess.run(
                [*command, "chaos", "run", str(folder / "scenario.toml"), str(run_dir), "--yes"], check=False
            )
            wait_for_training(run_dir)
            yield run_dir
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait()


def wait_for_training(run_dir: Path, patience_s: float = 600.0) -> None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        with contextlib.suppress(ControllerNotRunning, OSError):
            status = ask_controller(run_dir, "/api/v1/status")
            if status["phase"] == "training" and status["step"] > 30:
                return
        time.sleep(1.0)
    raise TimeoutError(f"the job in {run_dir} does not train")


def open_incident(run_dir: Path, folder: Path) -> Path:
    """The journal of a run up to the moment at which its last incident was open and judged."""
    with contextlib.closing(SqliteJournal(run_dir / "journal.db", read_only=True)) as journal:
        entries = list(journal.read())
    last = max(n for n, one in enumerate(entries) if one.decision.closed)
    stopped = max(n for n, one in enumerate(entries[:last]) if one.decision.phase is Phase.LAUNCHING)
    return write_journal(folder / "open.db", entries[: stopped + 1])


def simulated_journal(folder: Path) -> Path:
    entries: list[Entry] = []
    simulate(SIMULATED, entries.append)
    return write_journal(folder / "sim.db", entries)


def count_incidents(path: Path) -> int:
    with contextlib.closing(SqliteJournal(path, read_only=True)) as journal:
        return sum(entry.decision.closed is not None for entry in journal.read())


def take_chaos(album: Album, work: Path, flags: list[str]) -> None:
    with chaos_job(work, flags) as run_dir:
        stories = [f"incidents/{number}" for number in range(1, count_incidents(run_dir / "journal.db") + 1)]
        acts = [
            ("rank", "ranks", open_rank),
            ("stacks", "ranks", look_at_all),
            ("node", "nodes", open_node),
            ("order", "now", ask_hold),
        ]
        with served(run_dir) as address:
            album.show("chaos", address, [*VIEWS, *stories], *acts)
        with served(run_dir) as address:
            album.show_for_docs(address, HANG)
        with served(open_incident(run_dir, work)) as address:
            album.show("open", address, ["now", "incidents", f"incidents/{len(stories)}", "ranks"])


def take_simulated(album: Album, work: Path) -> None:
    path = simulated_journal(work)
    with served(path) as address:
        last = f"incidents/{count_incidents(path)}"
        album.show("sim", address, [*VIEWS, last], ("rank", "ranks", open_rank), ("node", "nodes", open_node))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=f"{(__doc__ or '').splitlines()[0]} All other flags go to the holdfast run of the real job."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "page", help="folder of the pictures")
    parser.add_argument("--only", choices=("chaos", "sim"), help="one of the two jobs")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    args, flags = parser.parse_known_args()
    program = shutil.which("chromium")
    if program is None:
        print("page-pictures: chromium is not installed", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    sync_playwright = import_module("playwright.sync_api").sync_playwright
    with tempfile.TemporaryDirectory(prefix="holdfast-pictures-") as work, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        album = Album(browser, args.out, args.scheme)
        if args.only != "sim":
            take_chaos(album, Path(work), flags)
        if args.only != "chaos":
            take_simulated(album, Path(work))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
