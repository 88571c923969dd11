"""The settings and the job that the flags of a command ask for."""

import secrets

from holdfast import config
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.config import Settings
from holdfast.logs import catalog_files
from holdfast.model.job_and_seats import Job

_LOST_S = 1800.0  # on several hosts: a controller on another one may take its time to come back
_LONE_LOST_S = 180.0  # of a job of one node: no other node can confirm its stop, so its standby waits for as long


def make_job(args: RunArgs, run_id: str, settings: Settings) -> Job:
    return Job(
        run_id=run_id,
        min_nodes=args.min_nodes,
        max_nodes=args.max_nodes,
        standbys=args.standbys,
        max_restarts=args.max_restarts,
        mark=secrets.token_hex(4),
        mesh=args.mesh,
        parity=settings.backup.parity,
        copies=settings.backup.copies,
        probes=settings.probe.allow,
        checks=settings.probe.allow,
        replays=settings.replay.allow,
    )


def load_settings(args: RunArgs) -> Settings:
    """Load the settings; flags of the command line that stand for a setting override the configuration file."""
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
    if args.fleet != "local" and not any(key == "node.lost_s" for key, _ in given):
        given.append(("node.lost_s", f"{_LONE_LOST_S if args.max_nodes == 1 else _LOST_S:g}"))
    settings = config.load(args.config, given)
    catalog_files.check_catalogs(settings)
    return settings
