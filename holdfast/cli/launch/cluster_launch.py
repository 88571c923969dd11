"""The part of `holdfast run` that all clusters share: the controller runs on this host, and nodes run elsewhere."""

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.cli.launch import release_packing
from holdfast.cli.launch.supervisor import Supervisor, leave_terminal, stopping_wait
from holdfast.cli.run_dirs import run_dir_creation, run_dir_secrets, run_selection
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs, parse_run_args
from holdfast.cli.terminal.rank_console import describe_shape, find_console_files, make_console, say
from holdfast.config import Settings
from holdfast.journal.journal_errors import JournalError
from holdfast.model.job_and_seats import Job
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec

if TYPE_CHECKING:
    from holdfast.cli.launch.controller_lease import ControllerLease


def check_cluster_flags(args: RunArgs, settings: Settings) -> None:
    """Raise UsageError for flags and settings that cannot be used with nodes of a cluster."""
    if isinstance(args.nproc, str):
        raise UsageError(f"--nproc-per-node {args.nproc}: give a number, since this host is none of the nodes")
    if settings.door.key:
        raise UsageError(
            f"door.authority, door.certificate and door.key do not go with --fleet {args.fleet}; unset them"
        )


def draft_run(args: RunArgs, settings: Settings, entry: EntryPoint, job: Job) -> RunSpec:
    """Return the spec of the run as far as it is known before the run has a folder and a port."""
    return RunSpec(
        job=msgspec.structs.replace(job, standbys=args.standbys, blocks=settings.block.age_s > 0),
        entry=entry,
        settings=settings,
        fleet=args.fleet,
        nproc=args.ranks_per_node(),
        log_dir="",
        fleet_flags=args.slurm,
        journal=args.journal or "",
        proven=True,
    )


class ClusterRun:
    """A run on a cluster with its controller on this host, either new or taken over from another host's controller."""

    def __init__(self, args: RunArgs, draft: RunSpec, lease: "ControllerLease | None" = None, secret: str = "") -> None:
        """Make the run directory. `lease` and `secret` are for a run whose journal is in Postgres."""
        self._args, self._lease = args, lease
        self._secret = secret or secrets.token_hex(16)
        run_id = draft.job.run_id
        # Each controller has its own folder, except on Slurm, where all hosts see one.
        own = f"/{lease.place}" if lease and draft.fleet != "slurm" else ""
        place = args.run_dir and f"{args.run_dir}{own}"
        self.run_dir = run_dir_creation.make_run_dir(place, run_id)
        log_dir = run_dir_creation.make_log_dir(args.log_dir, self.run_dir, run_id)
        self._draft = msgspec.structs.replace(draft, log_dir=str(log_dir))

    def carry(self, listener: socket.socket, where: str, why: str) -> int | None:
        """Keep a controller alive until the job ends, and return the exit code. Return None if another host takes over.
        Two texts are for the console: `where` says which nodes the job gets, and `why` explains their number."""
        run_dir, args = self.run_dir, self._args
        run, said = self._restore_run() or self._begin_run()
        run = msgspec.structs.replace(run, port=listener.getsockname()[1])
        run_dir_creation.publish_run(run_dir, run)
        run_selection.remember_run(run_dir)
        say(f"{run.fleet} fleet: {describe_shape(args, run.nproc)}{where}; run directory {run_dir}")
        for text in filter(None, (why, said, run_dir_creation.shared_journal_text(run, run_dir))):
            say(text)
        if args.detach:
            leave_terminal(run_dir)
        return Supervisor(run_dir, listener, make_console(args, run, run_dir), lease=self._lease).run()

    def _begin_run(self) -> tuple[RunSpec, str]:
        """Make the first release and the keys of a new run; return its spec, and a sentence for the console."""
        files = find_console_files()
        draft, args = self._draft, self._args
        run_dir_secrets.write_door_secret(self.run_dir, self._secret)  # the first release must not contain it
        apart = release_packing.keep_out(self.run_dir, draft.settings, args.token_file, (draft.log_dir, *files))
        begun = release_packing.pack_first_release(draft.entry, self.run_dir, apart, copied=args.release)
        run_dir_secrets.open_authority(self.run_dir)
        return msgspec.structs.replace(draft, release=begun.release, console_files=files), begun.said

    def _restore_run(self) -> tuple[RunSpec, str] | None:
        """Fetch keys and releases of an earlier controller from Postgres; return the run's spec, None for a new run."""
        if self._lease is None:
            return None
        from holdfast.cli.launch.run_handover import fetch_run

        try:
            begun = fetch_run(self._lease, self.run_dir, self._secret)
        except JournalError as e:
            raise UsageError(str(e)) from None
        if begun is None:
            return None
        went_on = msgspec.structs.replace(
            self._draft,
            job=begun.job,
            release=begun.release,
            resumed_at=time.time(),
            console_files=find_console_files(),
        )
        return went_on, "this host carries the controller; the run goes on from its journal"


def carry_in_turns(lease: "ControllerLease", carry: Callable[[], int | None], run_dir: Path) -> int:
    """Run the controller by `carry` whenever no other host does, until the run has ended; return the exit code. A stop
    signal ends the wait for another host; forget the run's secrets here then, as after the run's end."""
    claimed = lease.try_to_claim()
    while True:
        if claimed and (code := carry()) is not None:
            return code
        if not claimed and not lease.has_ended():
            say(f"{lease.carrier_text()} carries the controller of run {lease.run_id}; waiting to take it over")
        try:
            with stopping_wait("this host does not carry the controller any more"):
                claimed = lease.await_turn()
        except SystemExit:
            run_dir_secrets.forget_secrets(run_dir)
            raise
        if not claimed:
            say(f"run {lease.run_id} in {lease.url} has ended; another one needs another --rdzv-id")
            return 0


def join_args(run: RunSpec, name: str, *flags: str) -> RunArgs:
    """Return the arguments with which node `name` joins the run: those of `--fleet join`, plus `flags`."""
    words = ["--fleet", "join", "--rdzv-endpoint", f"{run.host}:{run.port}", "--rdzv-id", run.job.run_id]
    words += ["--nnodes", f"{run.job.min_nodes}:{run.job.max_nodes}", "--nproc-per-node", str(run.nproc)]
    words += ["--role", run.entry.role, *(("--journal", run.journal) if run.journal else ()), *flags]
    words += ["--module"]  # so that no script is looked for: one that this host lacks comes with the release
    args = parse_run_args([*words, *run.entry.argv], {})
    return msgspec.structs.replace(
        args, module=run.entry.module, no_python=not run.entry.python, node_rank=int(name[1:])
    )
