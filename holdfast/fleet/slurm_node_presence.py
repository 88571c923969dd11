"""Judges where a node is, from the fleet's record of it and Slurm's answers."""

from collections.abc import Iterable, Mapping

import msgspec

from holdfast.fleet.slurm_commands import ClusterView
from holdfast.fleet.slurm_replies import SlurmJob
from holdfast.model.action import Dismissal
from holdfast.model.fleet_node_reports import FleetNode, FleetState


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet records about a node. The record is written to disk before the fleet acts on it."""

    job: int = 0  # 0: asked for, and Slurm's answer is not known
    job_name: str = ""
    order: int = 0  # its place among the hosts of the job
    lent: bool = False  # the job is not ours: an allocation that the user had before
    host: str = ""  # "": the job has not begun
    doubled: bool = False  # that host has another node of ours, so this one is never started
    srun: int = 0  # pid; 0: the step has not been asked for
    seen: bool = False  # its step was there
    cut_off: bool = False  # Slurm lost its host while it was there: what Slurm says of its end is no proof
    released: str = ""  # why it was given back, in words
    cause: Dismissal = Dismissal.UNTOLD  # and for its host
    near: tuple[str, ...] = ()


def step_name(node: str) -> str:
    return f"holdfast-{node}"


def find_strays(jobs: Mapping[int, str], records: Iterable[NodeRecord]) -> tuple[int, ...]:
    """Return those of this run's jobs, names by ids, that no record tells of, and that nobody is asking for now."""
    known, asked = {0}, {""}
    for record in records:
        known.add(record.job)
        if not (record.job or record.released):
            asked.add(record.job_name)
    return tuple(job for job, name in jobs.items() if job not in known and name not in asked)


def judge_node(node: str, record: NodeRecord, view: ClusterView, *, launching: bool) -> FleetNode:
    """Return the fleet's view of a node. `launching` says that its `sbatch` or `srun` is alive. If Slurm ever lost
    contact with the host of a running node, the node is unknown: an end that Slurm reports is no proof."""
    job = view.jobs.get(record.job)
    if record.job not in view.asked and (record.job or launching):
        return FleetNode(state=FleetState.QUEUED, reason="its job is being submitted")
    if not record.job:
        return FleetNode(state=FleetState.GONE, reason="Slurm does not know of its job")
    if job is not None and job.is_queued:
        return FleetNode(state=FleetState.QUEUED, reason=job.reason)
    if record.doubled:
        return _placed(record, job, FleetState.GONE, f"Slurm gave it {record.host}, which has a node of this job")
    if job is not None and (job.is_starting or (job.is_running and not record.srun and record.host in job.hosts)):
        return FleetNode(state=FleetState.STARTING, host=record.host)
    if is_cut_off(record, view):
        host = view.hosts.get(record.host)
        why = f": {host.reason}" if host and host.reason else ""
        ended = f"; {_end_text(job)}" if job is not None and job.failed else ""
        return _placed(record, job, FleetState.UNKNOWN, f"Slurm gets no answer from {record.host}{why}{ended}")
    if view.find_step(record.job, step_name(node)):
        return _placed(record, job, FleetState.UP)
    if job is not None and launching and not record.seen:
        return _placed(record, job, FleetState.STARTING)
    if job is None or job.is_over:
        return _gone(record, job)
    return _placed(record, job, FleetState.GONE, "its step has ended")


def is_cut_off(record: NodeRecord, view: ClusterView) -> bool:
    host = view.hosts.get(record.host)
    return bool(record.srun) and (record.cut_off or (host is not None and not host.answers))


def _placed(record: NodeRecord, job: SlurmJob | None, state: FleetState, reason: str = "") -> FleetNode:
    ends_at = job.ends_at if job else 0.0
    reason = reason or (job.ending if job else "")
    return FleetNode(state=state, reason=reason, host=record.host, ends_at=ends_at, near=record.near)


def _gone(record: NodeRecord, job: SlurmJob | None) -> FleetNode:
    if job is None:
        return _placed(record, None, FleetState.GONE, f"job {record.job} ended some time ago")
    return msgspec.structs.replace(_placed(record, None, FleetState.GONE, _end_text(job)), failed=job.failed)


def _end_text(job: SlurmJob) -> str:
    by = f" by {job.cancelled_by}" if job.cancelled_by else ""
    why = f"{by} ({job.reason})" if job.reason else by
    return f"job {job.id} has ended: {job.state.lower().replace('_', ' ')}{why}"
