"""`holdfast run --fleet slurm`: the controller runs here, on a login node or in an allocation; nodes run on Slurm."""

import ipaddress
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.cli.launch.cluster_launch import ClusterRun, check_cluster_flags, draft_run
from holdfast.cli.launch.controller_listener import listen_at
from holdfast.cli.launch.slurm_node import MODULE
from holdfast.cli.launch.standby_count import choose_standbys
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.run_flags.run_arguments import RunArgs
from holdfast.config import Settings
from holdfast.fleet.slurm_commands import own_slurm_job
from holdfast.fleet.slurm_fleet import SlurmPlan
from holdfast.journal.journal_errors import JournalError
from holdfast.model.job_and_seats import Job
from holdfast.wire.run_and_node_specs import EntryPoint, RunSpec

if TYPE_CHECKING:
    from holdfast.cli.launch.controller_lease import ControllerLease

_WHERE = "name the address at which the nodes reach this host, with --local-addr"


def run_on_slurm(args: RunArgs, settings: Settings, entry: EntryPoint, job: Job) -> int:
    for program in ("sbatch", "srun", "squeue", "scancel"):
        if shutil.which(program) is None:
            raise UsageError(f"--fleet slurm: there is no {program} on this host; run it where you would type sbatch")
    check_cluster_flags(args, settings)
    args, why = choose_standbys(args)
    allocation, address = own_slurm_job(os.environ), find_own_address(args.local_addr)
    draft = msgspec.structs.replace(draft_run(args, settings, entry, job), host=address, allocation=allocation)
    lease = _claim_lease(args.journal, job.run_id) if args.journal else None
    with listen_at(address, args.port, "give another with --port, or 0 for any free one") as listener:
        where = f", first on the hosts of job {allocation}" if allocation else ""
        # If another host goes on with the run, that one tells its end.
        return ClusterRun(args, draft, lease).carry(listener, where, why) or 0


def _claim_lease(url: str, run_id: str) -> "ControllerLease":
    """Claim a new run in Postgres. Raise UsageError if a run of this name exists or the database does not answer."""
    from holdfast.cli.launch.controller_lease import ControllerLease

    lease = ControllerLease(url, run_id)
    try:
        if lease.try_to_claim():
            return lease
    except JournalError as e:
        raise UsageError(str(e)) from None
    raise UsageError(f"run {run_id} is in {url} already; give another --rdzv-id, or go on with holdfast run --resume")


def make_plan(run: RunSpec, run_dir: Path) -> SlurmPlan:
    return SlurmPlan(
        run_id=run.job.run_id,
        flags=run.fleet_flags,
        allocation=run.allocation,
        drain=run.settings.slurm.drain,
        lost_s=run.settings.node.lost_s,
        starts=(sys.executable, "-P", "-m", MODULE, str(run_dir)),
    )


def move_here(run: RunSpec) -> RunSpec:
    """Return the spec of a resumed run with the address, port and allocation that it has on this host."""
    address = find_own_address(None) if not _is_ours(run.host) else run.host
    port = run.port if address == run.host else 0  # nodes that are left expect the controller where it was
    return msgspec.structs.replace(run, host=address, port=port, allocation=own_slurm_job(os.environ))


def find_own_address(wanted: str | None) -> str:
    """Return an address of this host that other hosts can reach. Raise UsageError if the host's name leads to none."""
    name = wanted or socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror as e:
        raise UsageError(f"cannot resolve {name}, this host's name: {e.strerror}; {_WHERE}") from None
    if ipaddress.ip_address(found).is_loopback:
        raise UsageError(f"{name} stands for {found}, which other hosts cannot reach; {_WHERE}")
    return str(found)


def _is_ours(address: str) -> bool:
    """Return whether this is an address of this host, at which it can listen."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
