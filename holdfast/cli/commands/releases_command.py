"""`holdfast releases`: lists the releases that a job had, and what became of each."""

import contextlib
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from holdfast.cli.commands.order_commands import OrderUnanswered, ask_patiently
from holdfast.cli.run_dirs import run_directory, run_journal, run_liveness, run_selection
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.command_output import make_output
from holdfast.cli.terminal.command_parser import CommandParser
from holdfast.cli.terminal.quantity_text import duration_text
from holdfast.controller.decider_rebuild import RebuildError, rebuild_decider
from holdfast.core.decide.decider import Decider
from holdfast.core.record.ledger import Ledger
from holdfast.core.record.release_history import ReleaseHistory, ReleaseOverview, new_and_redone
from holdfast.core.terminal_sanitizer import strip_tree
from holdfast.journal.journal_errors import JournalError
from holdfast.logs.secret_masking import make_secret_masker
from holdfast.model.code_release import Fate
from holdfast.model.job_phase import Phase
from holdfast.wire.controller_request import ControllerNotRunning

PATH = "/api/v1/releases"
_COLOURS = {Fate.RUNNING: "green", Fate.REFUSED: "red", Fate.ROLLED_BACK: "red", Fate.WAITING: "yellow"}


def main(argv: list[str]) -> int:
    parser = CommandParser(prog="holdfast releases", description="Show the releases of a job.")
    run_selection.add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    args = parser.parse_args(argv)
    try:
        told = load_releases(run_selection.run_to_read(args))
    except (UsageError, JournalError, RebuildError, ControllerNotRunning) as e:
        print(f"holdfast releases: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(msgspec.json.encode(make_secret_masker().mask_commands(msgspec.to_builtins(told))).decode())
    else:
        make_output().print(render_releases(told, time.time()))
    return 0


def ask_releases(run_dir: Path, *, waits: bool = False) -> ReleaseOverview:
    """Return the releases from the controller; with `waits`, wait for a controller that is being restarted."""
    if not waits:
        return msgspec.convert(ask_controller(run_dir, PATH), ReleaseOverview, strict=False)
    try:
        return msgspec.convert(
            ask_patiently(run_dir, lambda: ask_controller(run_dir, PATH)), ReleaseOverview, strict=False
        )
    except ControllerNotRunning:
        raise OrderUnanswered(f"the run in {run_dir} {run_liveness.ending_text(run_dir)}") from None


def load_releases(run_dir: Path) -> ReleaseOverview:
    """Return the releases from the controller, or from the journal if the run has no controller."""
    if run_directory.find_controller(run_dir):
        return ask_releases(run_dir)
    decider, history, ledger = Decider(), ReleaseHistory(), Ledger()
    with contextlib.closing(run_journal.open_to_read(run_dir)) as journal:
        for entry in rebuild_decider(journal, decider):
            history.add(entry)
            ledger.add(entry)
    view = decider.view
    fates = {number: _last_fate(run_dir, view.phase, fate) for number, fate in view.fates.items()}
    chapters = history.list_chapters(view.releases, fates, view.fate_reasons, ledger.list_releases())
    return ReleaseOverview(running=view.running_release.number, releases=chapters)


def _last_fate(run_dir: Path, phase: Phase, fate: Fate) -> Fate:
    """Return a release's fate. If the run is over, the fate RUNNING is replaced: by ENDED if the job ended, or by LEFT
    if the controller and the supervisor just went away."""
    if fate is not Fate.RUNNING or run_liveness.is_front_alive(run_dir):
        return fate
    return Fate.ENDED if phase is Phase.DONE or (run_dir / "exit.json").exists() else Fate.LEFT


def render_releases(told: ReleaseOverview, now: float) -> Group:
    told = msgspec.convert(
        strip_tree(msgspec.to_builtins(told)), ReleaseOverview, strict=False
    )  # messages are people's own words
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("release", "fate", "who", "when", "new steps", "redone", "from", "message"):
        left = column not in ("release", "new steps", "redone")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    lines: list[Table | Text] = [table]
    for one in told.releases:
        release = one.release
        fate = Text(str(one.fate), style=_COLOURS.get(one.fate, ""))
        digest = f" {release.digest[:10]}" if release.digest else " where it stands"
        when = (
            f"{datetime.fromtimestamp(one.at, UTC):%Y-%m-%d %H:%M:%S} UTC, {duration_text(max(0.0, now - one.at))} ago"
        )
        source = f"{release.source}{digest}"
        table.add_row(str(release.number), fate, release.who, when, *new_and_redone(one), source, release.message)
        if one.why:
            lines.append(Text(f"{release.number}: {one.fate}: {one.why}"))
    if any(one.fate is Fate.RUNNING and one.steps for one in told.releases):
        lines.append(Text("steps of the running release are as its nodes last told: they may have made more since"))
    return Group(*lines)
