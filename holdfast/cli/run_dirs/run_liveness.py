"""Tells which processes of a run without a controller are alive on this host, and what a person can do with the run."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from holdfast.cli.run_dirs import batch_job_note, run_directory
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.linux import own_process_settings
from holdfast.wire import run_and_node_specs
from holdfast.wire.run_and_node_specs import ControllerAddress, RunEnd


def is_front_alive(run_dir: Path) -> bool:
    """Return whether the run's supervisor, its `holdfast run` process, is alive."""
    return own_process_settings.is_note_writer_alive(run_dir / run_directory.STDIN)


def is_starting(run_dir: Path) -> bool:
    """Return whether the run's supervisor is alive but its first controller has not yet written its address."""
    marks = ("controller.json", "plan.json", "exit.json")
    return is_front_alive(run_dir) and not any((run_dir / mark).exists() for mark in marks)


def find_live_nodes(run_dir: Path) -> list[str]:
    """Return the nodes of a run that have processes on this host. Ranks on these nodes may still train."""
    from holdfast.fleet.local_process_fleet import node_processes  # which only runs without a controller need

    notes = sorted((run_dir / "nodes").glob("*/holder.pid"))  # a holder that ends in order removes its note
    return [note.parent.name for note in notes if node_processes(note.parent)]


def is_joined_node(run_dir: Path) -> bool:
    """Return whether this is the directory of a node whose controller is on another host."""
    if _has_controlled(run_dir):
        return False
    try:
        return run_directory.read_spec(run_dir).fleet == "join"
    except UsageError:
        return False  # it is being made, or cannot be read: then nothing is known of it


def _has_controlled(run_dir: Path) -> bool:
    """Return whether a host that sees this directory ever ran the run's controller: it left a lock or, in old versions,
    only a journal."""
    return (run_dir / "journal.db").exists() or any(run_dir.glob("controller*.lock"))


def ending_text(run_dir: Path) -> str:
    """Describe a run without a controller: how it ended, or which of its processes are alive and how to resume it."""
    try:
        ended = run_and_node_specs.read_json(run_dir / "exit.json", RunEnd)
    except (OSError, msgspec.DecodeError):
        return _absence_text(run_dir)
    job = batch_job_note.read_job(run_dir) if run_directory.goes_on(run_dir) else 0
    more = f"; job {job} of Slurm is to go on with it: squeue --jobs={job}" if job else ""
    return f"has ended with code {ended.code}: {ended.reason}{more}"


def full_disk_text(run_dir: Path) -> str:
    """Return a clause on what a full disk does to a run without a controller; "" if the disk has room."""
    try:
        if not run_directory.is_disk_full(run_dir):
            return ""
        lost_s = run_directory.read_spec(run_dir).settings.node.lost_s
    except (OSError, UsageError):
        return ""
    lost = f"{lost_s:g} s after the controller's end nodes end their ranks, and what is in memory alone is lost"
    return f"; the disk that holds {run_dir} is full: free space, and the controller starts again; {lost}"


def controller_elsewhere(run_dir: Path) -> ControllerAddress | None:
    """Return the last address of a controller on another host that shares the run directory. Whether it is alive, only
    that host can tell."""
    if any(run_dir.glob(f"controller-{socket.gethostname()}.lock")) or not any(run_dir.glob("controller-*.lock")):
        return None  # it may have been here
    try:
        return run_and_node_specs.read_json(run_dir / "controller.json", ControllerAddress)
    except (OSError, msgspec.DecodeError):
        return None


def elsewhere_text(run_dir: Path, address: ControllerAddress) -> str:
    """Describe a run whose controller was last on another host, and how it is asked."""
    asked = f"holdfast status {address.url} --token-file {run_dir}/token --cacert {run_dir}/door/authority.pem"
    gone = f"if that host is gone, holdfast run --resume {run_dir} takes the run up again"
    host = urlsplit(address.url).hostname
    return f"had its controller last on {host}: give your command there, or as in {asked}; {gone}"


def _absence_text(run_dir: Path) -> str:
    if is_joined_node(run_dir):
        return "is a node of a job whose controller is on another host"
    if is_starting(run_dir):
        return "is starting, and its controller is not there yet"
    if is_front_alive(run_dir):
        return f"has no controller now, but its front, holdfast run, is alive{full_disk_text(run_dir)}"
    if address := controller_elsewhere(run_dir):
        return elsewhere_text(run_dir, address)
    if not _has_controlled(run_dir):
        return "has no controller yet"
    nodes = " but its nodes still run" if find_live_nodes(run_dir) else ""
    gone = f"has no controller now: its front, holdfast run, is gone{nodes}"
    return f"{gone}; holdfast run --resume {run_dir} takes it up again"
