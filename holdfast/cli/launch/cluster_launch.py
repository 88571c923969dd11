"""What `holdfast run` does on every cluster that gives nodes: the controller runs here, and nodes are elsewhere."""

import secrets
import socket
from pathlib import Path

import msgspec

from holdfast.cli.launch import release_packing
from holdfast.cli.launch.supervisor import Supervisor, leave_terminal
from holdfast.cli.run_dirs import run_directory, run_selection
from holdfast.cli.run_flags.run_arguments import RunArgs, UsageError, parse_run_args
from holdfast.cli.terminal.rank_console import describe_shape, find_console_files, make_console, say
from holdfast.config import Settings
from holdfast.model.job_and_seats import Job
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec


def check_cluster_flags(args: RunArgs, settings: Settings) -> None:
    """Raise UsageError for flags and settings that do not go with nodes which a cluster gives."""
    if isinstance(args.nproc, str):
        raise UsageError(f"--nproc-per-node {args.nproc}: give a number, since this host is none of the nodes")
    if settings.door.key:
        raise UsageError(
            f"door.authority, door.certificate and door.key do not go with --fleet {args.fleet}; unset them"
        )


def draft_run(args: RunArgs, settings: Settings, entry: EntryPoint, job: Job) -> RunSpec:
    """Return the run as far as it is known before it has a folder and a port."""
    return RunSpec(
        job=msgspec.structs.replace(job, standbys=args.standbys, blocks=settings.block.age_s > 0),
        entry=entry,
        settings=settings,
        fleet=args.fleet,
        nproc=args.ranks_per_node(),
        log_dir="",
        fleet_flags=args.slurm,
    )


class ClusterRun:
    """A new run whose controller is about to start here."""

    def __init__(self, args: RunArgs, draft: RunSpec, listener: socket.socket) -> None:
        """Make its folder, its first release and its keys."""
        self._args, self._listener = args, listener
        run_id = draft.job.run_id
        self.run_dir = run_directory.make_run_dir(args.run_dir, run_id)
        log_dir = run_directory.make_log_dir(args.log_dir, self.run_dir, run_id)
        files = find_console_files()
        apart = (log_dir, *map(Path, files))
        begun = release_packing.pack_first_release(draft.entry, self.run_dir, apart, copied=args.release)
        self._said = begun.said
        run_directory.write_door_secret(self.run_dir, secrets.token_hex(16))
        run_directory.open_authority(self.run_dir)
        self.run = msgspec.structs.replace(
            draft,
            log_dir=str(log_dir),
            port=listener.getsockname()[1],
            release=begun.release,
            console_files=files,
        )

    def carry(self, where: str, why: str) -> int:
        """Publish the run and keep its controller until the job ends; return the exit code. `where` says which nodes
        it gets, and `why` so many."""
        run, args, run_dir = self.run, self._args, self.run_dir
        run_directory.publish_run(run_dir, run)
        run_selection.remember_run(run_dir)
        say(f"{run.fleet} fleet: {describe_shape(args, run.nproc)}{where}; run directory {run_dir}")
        for text in filter(None, (why, self._said)):
            say(text)
        if args.detach:
            leave_terminal(run_dir)
        front = Supervisor(run_dir, self._listener, make_console(args, run, run_dir))
        return front.run() or 0  # no other host takes it over


def join_args(run: RunSpec, name: str, *flags: str) -> RunArgs:
    """Return what this node would be given to join the run as a host does: these flags, and what all nodes have."""
    words = ["--fleet", "join", "--rdzv-endpoint", f"{run.host}:{run.port}", "--rdzv-id", run.job.run_id]
    words += ["--nnodes", f"{run.job.min_nodes}:{run.job.max_nodes}", "--nproc-per-node", str(run.nproc)]
    words += ["--role", run.entry.role, *flags]
    words += ["--module"]  # so that no script is looked for: one that this host lacks comes with the release
    args = parse_run_args([*words, *run.entry.argv], {})
    return msgspec.structs.replace(
        args, module=run.entry.module, no_python=not run.entry.python, node_rank=int(name[1:])
    )
