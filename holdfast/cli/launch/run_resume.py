"""`holdfast run --resume`: continues a run whose supervisor is gone."""

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.cli.launch.controller_listener import listen_at, listen_for_pods
from holdfast.cli.launch.run_leases import make_file_lease
from holdfast.cli.launch.slurm_launch import move_here
from holdfast.cli.launch.supervisor import Supervisor, leave_terminal, stopping_wait
from holdfast.cli.run_dirs import run_dir_creation, run_directory, run_journal, run_liveness, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.cli.terminal.rank_console import find_console_files, make_console, say
from holdfast.config import Settings
from holdfast.controller.decider_rebuild import RebuildError, rebuild_decider
from holdfast.core.decide.decider import Decider
from holdfast.journal.file_lease import LASTS_S, take_when_quiet
from holdfast.journal.journal_errors import JournalDamagedError, JournalError
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import RunSpec

if TYPE_CHECKING:
    from holdfast.cli.launch.controller_lease import ControllerLease


def resume_run(args: RunArgs, settings: Settings | None) -> int:
    """Resume a run and return its exit code; `settings`, if given, replace those of the run."""
    run_dir = run_selection.find(args.resume)
    run_dir.chmod(0o700)
    run = run_directory.read_spec(run_dir)
    if alive := run_directory.find_controller(run_dir):
        raise UsageError(f"this run has a controller already (pid {alive.pid}); look with holdfast status {run_dir}")
    if (run_dir / "exit.json").exists() and not run_directory.goes_on(run_dir):
        raise UsageError(f"this run has ended (see holdfast report {run_dir}); its command starts a new one")
    if full := run_dir_creation.no_room_text(run_dir):
        raise UsageError(f"{full}; free some, and resume it then")
    _check_replay(run_dir)
    if run.fleet in ("local", "join") and not run.journal:
        run_dir_creation.require_local_disk(run_dir)
    with stopping_wait("the run is as it was"):
        if run.fleet == "slurm" and not run.journal:
            _take_file_lease(run_dir)
        lease = _claim_again(run, run_directory.goes_on(run_dir)) if run.journal else None
    files = dict.fromkeys((*run.console_files, *find_console_files()))
    run = msgspec.structs.replace(run, console_files=tuple(files))
    if settings is not None:
        run = msgspec.structs.replace(run, settings=settings)
    if run.fleet == "slurm":
        run = move_here(run)
    listen = listen_for_pods if run.fleet == "kubernetes" else listen_at
    with listen(run.host, run.port, "this run's nodes expect the controller there, so free the port") as listener:
        resumed = msgspec.structs.replace(run, resumed_at=time.time(), port=listener.getsockname()[1])
        run_and_node_specs.write_json(run_dir / "run.json", resumed)
        console = make_console(args, run, run_dir)
        console.skip_to_end()
        unseen = f"what ranks have printed without a front is not shown here, but by holdfast logs {run_dir}"
        went_on = f"; {unseen}" if run_liveness.find_live_nodes(run_dir) else ""
        say(f"resuming {run.job.run_id} in {run_dir}{went_on}")
        if said := run_dir_creation.shared_journal_text(run, run_dir):
            say(said)
        if args.detach:
            leave_terminal(run_dir)
        return Supervisor(run_dir, listener, console, lease=lease).run() or 0


def _take_file_lease(run_dir: Path) -> None:
    """Take the lease of a run directory that other hosts see, for the controller that starts here. Raise UsageError if
    a controller on another host renews it."""
    lease = make_file_lease(run_dir, say)
    try:
        if lease.try_to_take():
            return
        say(f"{lease.carrier_text()} had this run's controller; waiting {LASTS_S:g} s to be sure that it has ended")
        if not take_when_quiet(lease):
            raise UsageError(f"{lease.carrier_text()} has this run's controller; look with holdfast status there")
    except OSError as e:
        raise UsageError(f"cannot take the lease in {run_dir}: {e.strerror}") from None


def _claim_again(run: RunSpec, goes_on: bool) -> "ControllerLease":
    """Claim a run whose journal is in Postgres and whose supervisor on this host has ended. Raise UsageError if the run
    has ended, or if another host runs its controller."""
    from holdfast.cli.launch.controller_lease import ControllerLease

    lease = ControllerLease(run.journal, run.job.run_id, goes_on=goes_on)
    try:
        claimed = lease.await_claim()
    except JournalError as e:
        raise UsageError(str(e)) from None
    if not claimed:
        raise UsageError(f"run {run.job.run_id} has ended, or {lease.carrier_text()} carries its controller")
    return lease


def _check_replay(run_dir: Path) -> None:
    """Check that this version of holdfast can continue the journal; call this before you end any process of the run."""
    try:
        # The controller goes on without what is damaged, and says so.
        with (
            contextlib.closing(run_journal.open_to_read(run_dir)) as journal,
            contextlib.suppress(JournalDamagedError),
        ):
            for _ in rebuild_decider(journal, Decider()):
                pass
    except run_journal.NoJournalError:
        return
    except RebuildError as e:
        raise UsageError(f"{e}; resume with the version that wrote it") from None
    except JournalError as e:
        raise UsageError(str(e)) from None
