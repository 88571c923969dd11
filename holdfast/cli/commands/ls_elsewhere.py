"""Rows of `holdfast ls` for runs that are not in run directories of this host: in a database, or on a cluster."""

import asyncio
import os
import subprocess
import time

import msgspec

from holdfast.cli.run_dirs.journal_database_connection import open_database
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.quantity_text import counted_noun, duration_text
from holdfast.fleet import cluster_runs
from holdfast.fleet.cluster_runs import ClusterRunView
from holdfast.journal.lease_term import no_lease
from holdfast.model.job_phase import Phase

UNKNOWN_STEP = "step unknown"
CLUSTERS = ("slurm", "kubernetes")
_ANSWER_S = 60.0


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    run_dir: str  # or the database that has its journal, or the cluster
    state: str  # the phase of one that is alive; "ended", "left" by its front, "unreadable"; "running", "waiting"
    detail: str
    script: str
    started_at: float  # 0: not known
    resumed_at: float = 0.0  # 0: it was not
    nodes: int | None = None  # None: not known
    step: int | None = None  # the same
    who: str = ""  # the same


def database_rows(url: str) -> list[RunRow]:
    """Return the rows of all runs in a database, oldest first."""
    with open_database(url, "--journal ") as link:
        from holdfast.journal import postgres_lease, postgres_schema

        postgres_schema.require_schema(link)
        rows = []
        for run in postgres_lease.list_runs(link):
            host = run.holder.partition(" ")[0]
            state, detail = run.phase.value, f", carried by {host}" + (f" at {run.address}" if run.address else "")
            seen = (
                postgres_lease.RunGlance()
                if run.phase is Phase.DONE
                else postgres_lease.glance_at_run(link, run.run_id)
            )
            if run.phase is Phase.DONE:
                state, detail = "ended", ""
            elif not run.held:
                since = f" for {duration_text(max(0.0, time.time() - run.alive_at))}" if run.alive_at else ""
                state = "left"
                detail = f": no controller{since}; its command on a host of its --rdzv-endpoint takes it up"
            if state != "ended":
                detail = f"{_sizes_text(seen.nodes, seen.step)}{detail}"
            rows.append(
                RunRow(
                    run_id=run.run_id, run_dir=url, state=state, detail=detail, script="", started_at=run.began_at,
                    nodes=seen.nodes, step=seen.step,
                )
            )  # fmt: skip
        return rows


def cluster_rows(fleet: str, namespace: str | None) -> list[RunRow]:
    """Return the rows of all runs that have nodes on a cluster. Raise UsageError if the cluster does not answer."""
    where, found = _ask_slurm() if fleet == "slurm" else _ask_kubernetes(namespace)
    return [_cluster_row(run, where) for run in found]


def _cluster_row(run: ClusterRunView, where: str) -> RunRow:
    waiting = f", and {run.waiting} more waiting" if run.running and run.waiting else ""
    nodes = run.running or run.waiting
    return RunRow(
        run_id=run.run_id,
        run_dir=where,
        state="running" if run.running else "waiting" if run.waiting else "ended",
        detail=f"{_sizes_text(nodes, None)}{waiting}" if nodes else "",
        script="",
        started_at=run.since,
        nodes=run.running + run.waiting,
        who=run.who,
    )


def _sizes_text(nodes: int | None, step: int | None) -> str:
    many = f" with {counted_noun(nodes, 'node')}" if nodes is not None else ""
    return f"{many}, {UNKNOWN_STEP if step is None else f'step {step}'}"


def _ask_slurm() -> tuple[str, list[ClusterRunView]]:
    words = ["squeue", "--noheader", f"--format={cluster_runs.SQUEUE_FORMAT}"]
    try:
        done = subprocess.run(
            words,
            check=False,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        )
    except FileNotFoundError:
        raise UsageError("--fleet slurm: there is no squeue on this host; run it where you would type sbatch") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"--fleet slurm: squeue has not answered for {_ANSWER_S:g} s") from None
    if done.returncode:
        raise UsageError(f"--fleet slurm: squeue: {' '.join(done.stderr.split()) or f'code {done.returncode}'}")
    return "slurm", cluster_runs.parse_squeue(done.stdout)


def _ask_kubernetes(namespace: str | None) -> tuple[str, list[ClusterRunView]]:
    try:
        from holdfast.fleet.kubernetes_client import KubernetesClient, default_namespace, read_config
    except ModuleNotFoundError as e:
        raise UsageError(f"--fleet kubernetes: there is no {e.name} here; pip install 'holdfast[kubernetes]'") from None

    async def ask() -> tuple[str, list[ClusterRunView]]:
        config = read_config()
        where = namespace or default_namespace(config)
        client = KubernetesClient(config, where, no_lease)
        try:
            pods, _ = await client.list_pods(None)
        finally:
            await client.close()
        return f"namespace {where}", cluster_runs.read_pods(pods)

    try:
        return asyncio.run(ask())
    except OSError as e:
        raise UsageError(f"--fleet kubernetes: {e}") from None
