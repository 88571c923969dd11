"""`--standbys auto`: chooses the number of standbys from the journals of past runs on the same kind of fleet."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from holdfast.cli.run_dirs import run_directory, run_journal, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.core.membership.loss_rate import NodeLosses, StandbyAdvice, advise_standbys
from holdfast.core.record.job_account import Account, TimeUse
from holdfast.core.record.ledger import fold_entries
from holdfast.journal.journal_errors import JournalError
from holdfast.model.journal_entry import Entry

_LONGEST_S = 5.0  # that reading may take; older runs then do not count


def choose_standbys(args: RunArgs) -> tuple[RunArgs, str]:
    """Replace `--standbys auto` by a number; return the arguments and the reason, which is "" without `auto`."""
    if args.refill_h is None:
        return args, ""
    advice: StandbyAdvice = advise_standbys(args.max_nodes, args.refill_h, _past_losses(args.fleet))
    return msgspec.structs.replace(args, standbys=advice.standbys, refill_h=None), advice.reason


def _past_losses(fleet: str) -> NodeLosses:
    """Count the nodes lost and node hours of ended runs on this kind of fleet, newest run first, within a time limit.
    The kind matters: nodes of a local fleet are processes of one host, and are lost in other ways than machines."""
    seen, until = NodeLosses(), time.monotonic() + _LONGEST_S
    for run_dir in reversed(run_selection.known_runs()):
        if time.monotonic() > until:
            break
        with contextlib.suppress(UsageError, JournalError, OSError):
            if (run_dir / "exit.json").exists():
                seen = _with_run(seen, run_dir, fleet, until)
    return seen


def _with_run(seen: NodeLosses, run_dir: Path, fleet: str, until: float) -> NodeLosses:
    run = run_directory.read_spec(run_dir)
    if run.fleet != fleet:
        return seen
    with contextlib.closing(run_journal.open_to_read(run_dir)) as journal:
        account = fold_entries(_stop_at(until, journal.read()))
    return add_run(seen, account, run.job.max_nodes + run.job.standbys)


def _stop_at(until: float, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield `entries` unchanged. Raise TimeoutError if an entry is read later than `until`, a monotonic time."""
    for entry in entries:
        if time.monotonic() > until:
            raise TimeoutError
        yield entry


def add_run(seen: NodeLosses, account: Account, nodes: int) -> NodeLosses:
    """Return `seen` plus one run's lost nodes and node hours; hours without a controller do not count."""
    lost = sum(len(incident.evicted) for incident in account.incidents) + len(account.lost_standbys)
    watched_h = (account.job_s - account.spent_s(TimeUse.UNWATCHED)) / 3600
    return NodeLosses(runs=seen.runs + 1, lost=seen.lost + lost, node_h=seen.node_h + nodes * watched_h)
