"""`holdfast run`: starts a training job with torchrun's command line, and keeps it running."""

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.cli.launch.supervisor import Supervisor

from holdfast.cli.launch.controller_listener import listen_at
from holdfast.cli.launch.fork_server_start import start_fork_server
from holdfast.cli.launch.job_request import load_settings, make_job
from holdfast.cli.launch.unstarted_run import MadeFolders, hold_signals, obey_signals, removed_unless_begun
from holdfast.cli.run_dirs import run_dir_creation
from holdfast.cli.run_dirs.journal_database_connection import check_database
from holdfast.cli.run_flags import run_arguments
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.client.boot.zygote import FIRST_PRELOAD, LATER_PRELOAD
from holdfast.config import ConfigError, Settings
from holdfast.wire.program_fork_server import ForkServer
from holdfast.wire.rank_environment_defaults import with_whole_paths
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec


def main(argv: list[str]) -> int:
    try:
        args = run_arguments.parse_run_args(argv, os.environ)
        if args.notes:
            from holdfast.cli.terminal.rank_console import say

            for note in args.notes:
                say(note)
        if args.resume is not None:
            from holdfast.cli.launch.run_resume import resume_run

            return resume_run(args, load_settings(args) if args.settings or args.config else None)
        settings = load_settings(args)
        os.environ.update(with_whole_paths(os.environ, os.getcwd()))  # nothing of ours is started from this folder
        if args.journal:
            check_database(args.journal, "--journal ")
        if args.fleet == "join" and args.journal:
            from holdfast.cli.launch.controller_turns import join_in_turns

            return join_in_turns(args, settings, _make_entry(args))
        if args.fleet == "join":
            from holdfast.cli.launch.host_join import join_job

            return join_job(args, settings, _make_entry(args))
        if args.fleet == "slurm":
            from holdfast.cli.launch.slurm_launch import run_on_slurm

            job = make_job(args, args.run_id or run_dir_creation.new_run_id(), settings)
            return run_on_slurm(args, settings, _make_entry(args), job)
        if args.fleet == "kubernetes":
            from holdfast.cli.launch.kubernetes_launch import run_on_kubernetes

            job = make_job(args, args.run_id or run_dir_creation.new_run_id(), settings)
            return run_on_kubernetes(args, settings, _make_entry(args), job)
        if settings.door.key:
            raise UsageError(
                "door.authority, door.certificate and door.key need --rdzv-endpoint; give it, or unset them"
            )
        return _run_local(args, settings)
    except (UsageError, ConfigError) as e:
        print(f"holdfast run: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("holdfast run: stopped by Ctrl-C", file=sys.stderr)
        return 130


def _make_entry(args: RunArgs) -> EntryPoint:
    return EntryPoint(
        argv=(args.script, *args.script_args),
        module=args.module,
        python="" if args.no_python else args.python,
        zygote=args.zygote and not args.no_python and args.python == sys.executable,
        preload=(*FIRST_PRELOAD, *args.preload),
        later=LATER_PRELOAD,
        cwd=os.getcwd(),
        role=args.role,
    )


def _run_local(args: RunArgs, settings: Settings) -> int:
    args, why = _size_standbys(args)
    mend = "give another with --port, or 0 for any free one"
    with listen_at("127.0.0.1", args.port, mend) as listener, contextlib.ExitStack() as closing:
        with removed_unless_begun() as made:
            supervisor = _prepare_run(args, settings, listener, closing, (made, why))
        obey_signals()
        return supervisor.run() or 0


def _prepare_run(
    args: RunArgs,
    settings: Settings,
    listener: socket.socket,
    closing: contextlib.ExitStack,
    told: tuple[MadeFolders, str],
) -> "Supervisor":
    nproc, (made, why) = args.ranks_per_node(), told
    run_id = args.run_id or run_dir_creation.new_run_id()
    there = args.run_dir is not None and Path(args.run_dir).is_dir()
    run_dir = run_dir_creation.make_run_dir(args.run_dir, run_id)
    made.add_folder(run_dir, kept=there)
    run_dir_creation.require_local_disk(run_dir)
    log_dir = run_dir_creation.make_log_dir(args.log_dir, run_dir, run_id)
    made.add_folder(log_dir)
    server = _early_server(args, run_dir, closing)
    # What is imported from here on, and done, costs no time: the fork server has more to import.
    from holdfast.cli.launch import release_packing
    from holdfast.cli.launch.supervisor import Supervisor, leave_terminal
    from holdfast.cli.run_dirs import run_selection
    from holdfast.cli.terminal.rank_console import describe_shape, find_console_files, make_console, say

    entry = _make_entry(args)
    files = find_console_files()
    apart = release_packing.keep_out(run_dir, settings, args.token_file, (log_dir, *files))
    begun = release_packing.pack_first_release(entry, run_dir, apart, copied=args.release)
    run = RunSpec(
        job=make_job(args, run_id, settings),
        entry=entry,
        settings=settings,
        fleet="local",
        nproc=nproc,
        log_dir=str(log_dir),
        port=listener.getsockname()[1],
        release=begun.release,
        console_files=files,
    )
    hold_signals()
    run_dir_creation.publish_run(run_dir, run)
    run_selection.remember_run(run_dir)
    say(f"local fleet: {describe_shape(args, run.nproc)} on this host; run directory {run_dir}")
    if why:
        say(why)
    say(begun.said)
    if args.detach:
        leave_terminal(run_dir)
    return Supervisor(run_dir, listener, make_console(args, run, run_dir), server)


def _size_standbys(args: RunArgs) -> tuple[RunArgs, str]:
    if args.refill_h is None:  # nothing is imported for jobs that name their number
        return args, ""
    from holdfast.cli.launch.standby_count import choose_standbys

    return choose_standbys(args)


def _early_server(args: RunArgs, run_dir: Path, closing: contextlib.ExitStack) -> ForkServer | None:
    """Start the fork server early, so that it imports torch while the rest of the run is prepared. Return None with
    --detach, because a detached run outlives this process."""
    if args.detach:
        return None
    run_dir_creation.save_environment(run_dir)
    server = start_fork_server(run_dir, _make_entry(args).zygote, args.max_nodes + args.standbys)
    if server is not None:
        closing.callback(server.close)
    return server
