"""`holdfast releases`: which versions of the user's code a job had, and what became of them."""

import contextlib
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from holdfast.cli import rundir, runs
from holdfast.cli.api import ask
from holdfast.cli.flagtable import UsageError
from holdfast.cli.order import Unheard, patiently
from holdfast.cli.parsing import CommandParser
from holdfast.cli.wording import duration
from holdfast.controller.replay import ReplayError, replay
from holdfast.core.decider import Decider
from holdfast.core.history import History, Told
from holdfast.core.plain import plain_tree
from holdfast.journal.sqlite import JournalError, SqliteJournal
from holdfast.model.release import Fate
from holdfast.wire.controller_call import NotRunning

PATH = "/api/v1/releases"
_COLOURS = {Fate.RUNNING: "green", Fate.REFUSED: "red", Fate.ROLLED_BACK: "red", Fate.WAITING: "yellow"}


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast releases", description="Show the releases of a job.")
    runs.add_run(parser)
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    args = parser.parse_args(argv)
    try:
        told = load(runs.looked_at(args))
    except (UsageError, JournalError, ReplayError, NotRunning) as e:
        print(f"holdfast releases: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(msgspec.json.encode(told).decode())
    else:
        Console(markup=False, highlight=False).print(render(told, time.time()))
    return 0


def ask_all(run_dir: Path, *, waits: bool = False) -> Told:
    """From the controller; with `waits` from its successor, should it just be restarted."""
    if not waits:
        return msgspec.convert(ask(run_dir, PATH), Told, strict=False)
    try:
        return msgspec.convert(patiently(run_dir, lambda: ask(run_dir, PATH)), Told, strict=False)
    except NotRunning:
        raise Unheard(f"the run in {run_dir} {rundir.ending(run_dir)}") from None


def load(run_dir: Path) -> Told:
    """From the controller, or from the journal of a run that has none."""
    if rundir.listening(run_dir):
        return ask_all(run_dir)
    path = run_dir / "journal.db"
    if not path.exists():
        raise UsageError(f"{run_dir} has no journal yet; its controller has not started")
    decider, history = Decider(), History()
    with contextlib.closing(SqliteJournal(path, read_only=True)) as journal:
        for entry in replay(journal, decider):
            history.add(entry)
    releases = decider.releases
    return Told(running=releases.running.number, releases=history.chapters(releases))


def render(told: Told, now: float) -> Group:
    told = msgspec.convert(plain_tree(msgspec.to_builtins(told)), Told, strict=False)  # messages are people's own words
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("release", "fate", "who", "when", "steps", "from", "message"):
        table.add_column(column, justify="right" if column in ("release", "steps") else "left", overflow="fold")
    lines: list[Table | Text] = [table]
    for one in told.releases:
        release = one.release
        fate = Text(str(one.fate), style=_COLOURS.get(one.fate, ""))
        digest = f" {release.digest[:10]}" if release.digest else " where it stands"
        when = f"{datetime.fromtimestamp(one.at, UTC):%Y-%m-%d %H:%M:%S} UTC, {duration(max(0.0, now - one.at))} ago"
        source = f"{release.source}{digest}"
        table.add_row(str(release.number), fate, release.who, when, str(one.steps), source, release.message)
        if one.why:
            lines.append(Text(f"{release.number}: {one.fate}: {one.why}"))
    return Group(*lines)
