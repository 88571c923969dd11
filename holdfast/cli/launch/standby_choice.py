"""`--standbys auto`: how many standbys the job gets, from the journals of past runs of the same fleet."""

import contextlib
import time
from pathlib import Path

import msgspec

from holdfast.cli.run_dirs import run_directory, run_selection
from holdfast.cli.run_flags.run_arguments import RunArgs, UsageError
from holdfast.core.membership.loss_rate import NodeLosses, StandbyAdvice, advise_standbys
from holdfast.core.record.ledger import fold_entries
from holdfast.journal.sqlite_journal import JournalError, SqliteJournal

_LONGEST_S = 5.0  # that reading may take; older runs then do not count


def choose_standbys(args: RunArgs) -> tuple[RunArgs, str]:
    """Return the arguments with the number of standbys, and the reason for it; as they are if a number was given."""
    if args.refill_h is None:
        return args, ""
    advice: StandbyAdvice = advise_standbys(args.max_nodes, args.refill_h, _past_losses(args.fleet))
    return msgspec.structs.replace(args, standbys=advice.standbys, refill_h=None), advice.reason


def _past_losses(fleet: str) -> NodeLosses:
    """Return what ended runs of this fleet show, the newest first. Nodes of the local fleet are processes of one host,
    and are lost in other ways than machines."""
    seen, until = NodeLosses(), time.monotonic() + _LONGEST_S
    for run_dir in reversed(run_selection.known_runs()):
        if time.monotonic() > until:
            break
        with contextlib.suppress(UsageError, JournalError, OSError):
            if (run_dir / "exit.json").exists() and (run_dir / "journal.db").exists():
                seen = _with_run(seen, run_dir, fleet)
    return seen


def _with_run(seen: NodeLosses, run_dir: Path, fleet: str) -> NodeLosses:
    run = run_directory.read_spec(run_dir)
    if run.fleet != fleet:
        return seen
    with contextlib.closing(
        SqliteJournal(run_dir / "journal.db", read_only=True, mark_path=run_dir / "journal.mark")
    ) as journal:
        account = fold_entries(journal.read(), None)
    lost = sum(len(incident.evicted) for incident in account.incidents) + len(account.lost_standbys)
    nodes = run.job.max_nodes + run.job.standbys
    return NodeLosses(runs=seen.runs + 1, lost=seen.lost + lost, node_h=seen.node_h + nodes * account.wall_s / 3600)
