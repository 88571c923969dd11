"""The job that the flags and settings of a command ask for."""

import secrets

from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.config import Settings
from holdfast.model.job_and_seats import Job


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
