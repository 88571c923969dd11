"""`holdfast run`: torchrun's command line, and a job that heals itself."""

import contextlib
import errno
import os
import secrets
import socket
import sys
from pathlib import Path

import msgspec

from holdfast import config
from holdfast.cli import flags, packing, rundir, runs
from holdfast.cli.console import console_of, say, shape
from holdfast.cli.flags import RunArgs, UsageError
from holdfast.cli.front import Front, leave_terminal
from holdfast.cli.joining import join
from holdfast.client.zygote import DEFAULT_PRELOAD
from holdfast.config import ConfigError, Settings
from holdfast.controller.replay import ReplayError, replay
from holdfast.core.decider import Decider
from holdfast.journal.sqlite import JournalDamagedError, JournalError, SqliteJournal
from holdfast.logs import catalog
from holdfast.model.topology import Job
from holdfast.wire import spec
from holdfast.wire.environment import with_whole_paths
from holdfast.wire.spec import Entry, RunSpec


def main(argv: list[str]) -> int:
    try:
        args = flags.parse(argv, os.environ)
        for note in args.notes:
            say(note)
        if args.resume is not None:
            return _resume(args)
        settings = _settings(args)
        os.environ.update(with_whole_paths(os.environ, os.getcwd()))  # nothing of ours is started from this folder
        if args.fleet == "join":
            return join(args, settings, _entry(args))
        if settings.door.key:
            raise UsageError(
                "door.key and its like are for jobs that span hosts: give --rdzv-endpoint, or leave them out"
            )
        return _local(args, settings)
    except (UsageError, ConfigError, JournalError) as e:
        print(f"holdfast run: {e}", file=sys.stderr)
        return 2


def _settings(args: RunArgs) -> Settings:
    """Settings, with what torchrun's own flags say about them on top."""
    given = [*args.settings]
    if args.grace_s is not None:
        given.append(("recovery.shutdown_grace_s", str(args.grace_s)))
    if args.on_incident is not None:
        given.append(("hook.command", args.on_incident))
    if args.snapshot_memory is not None:
        given.append(("snapshot.memory", args.snapshot_memory))
    for key, setting in (("join_timeout", "recovery.wait_s"), ("last_call_timeout", "recovery.last_call_s")):
        if key in args.rdzv_conf:
            given.append((setting, str(args.rdzv_conf[key])))
    if args.fleet == "join" and not any(key == "node.lost_s" for key, _ in given):
        given.append(("node.lost_s", "1800"))  # a controller on another host may take its time to come back
    settings = config.load(args.config, given)
    catalog.check(settings)
    return settings


def _entry(args: RunArgs) -> Entry:
    return Entry(
        argv=(args.script, *args.script_args),
        module=args.module,
        python="" if args.no_python else args.python,
        zygote=args.zygote and not args.no_python and args.python == sys.executable,
        preload=(*DEFAULT_PRELOAD, *args.preload),
        cwd=os.getcwd(),
        role=args.role,
    )


def _local(args: RunArgs, settings: Settings) -> int:
    nproc = args.ranks()
    with listen("127.0.0.1", args.port, "give another with --port, or 0 for any free one") as listener:
        run_id = args.run_id or rundir.new_id()
        run_dir = rundir.make(args.run_dir, run_id)
        log_dir = rundir.make_log_dir(args.log_dir, run_dir, run_id)
        entry = _entry(args)
        begun = packing.first(entry, run_dir, (log_dir,), copied=args.release)
        run = RunSpec(
            job=_job(args, run_id, settings),
            entry=entry,
            settings=settings,
            fleet="local",
            nproc=nproc,
            log_dir=str(log_dir),
            port=listener.getsockname()[1],
            release=begun.release,
        )
        rundir.publish(run_dir, run)
        runs.note(run_dir)
        say(f"local fleet: {shape(args, run.nproc)} on this host; run directory {run_dir}")
        say(begun.said)
        if args.detach:
            leave_terminal(run_dir)
        return Front(run_dir, listener, console_of(args, run, run_dir)).run()


def _job(args: RunArgs, run_id: str, settings: Settings) -> Job:
    return Job(
        run_id=run_id,
        min_nodes=args.min_nodes,
        max_nodes=args.max_nodes,
        standbys=args.standbys,
        max_restarts=args.max_restarts,
        mark=secrets.token_hex(4),
        mesh=args.mesh,
        parity=settings.backup.parity,
        probes=settings.probe.allow,
        checks=settings.probe.allow,
        replays=settings.replay.allow,
    )


def listen(host: str, port: int, mend: str) -> socket.socket:
    """The controller's port, bound here: it outlives controllers, and trouble with it is told before all else."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(4096)
    except OSError as e:
        listener.close()
        why = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be used: {e.strerror}"
        raise UsageError(f"port {port} on {host} {why}; {mend}") from None
    return listener


def _resume(args: RunArgs) -> int:
    run_dir = rundir.find(args.resume)
    run = rundir.read_spec(run_dir)
    if alive := rundir.listening(run_dir):
        raise UsageError(f"this run has a controller already (pid {alive.pid}); look with holdfast status {run_dir}")
    if (run_dir / "exit.json").exists():
        raise UsageError(f"this run has ended; see holdfast report {run_dir}, or start a new one")
    _check_replay(run_dir)
    if args.settings or args.config:
        run = msgspec.structs.replace(run, settings=_settings(args))
    with listen(run.host, run.port, "this run's nodes look for it there, so that must be free") as listener:
        spec.write(run_dir / "run.json", run)
        console = console_of(args, run, run_dir)
        console.skip_to_end()
        say(f"resuming {run.job.run_id} in {run_dir}")
        if args.detach:
            leave_terminal(run_dir)
        return Front(run_dir, listener, console).run()


def _check_replay(run_dir: Path) -> None:
    """Before anything is touched: what runs is not to be ended because of a journal that we cannot go on with."""
    path = run_dir / "journal.db"
    if not path.exists():
        return
    try:
        # The controller goes on without what is damaged, and says so.
        with (
            contextlib.closing(SqliteJournal(path, read_only=True)) as journal,
            contextlib.suppress(JournalDamagedError),
        ):
            for _ in replay(journal, Decider()):
                pass
    except ReplayError as e:
        raise UsageError(f"{e}; resume with the version that wrote it") from None
