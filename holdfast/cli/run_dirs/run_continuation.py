"""Tells whether a run whose nodes were all taken away goes on: in its own front, or in another job of Slurm."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.cli.run_dirs import batch_job_note, run_directory, run_liveness
from holdfast.wire.run_and_node_specs import RunSpec

_ASK_S, _SOON_S = 10.0, 0.5  # between two questions to Slurm, and to files
_FRONT_S = 60.0  # within which a front on another host begins with the next controller


class RunContinuation:
    """Watches for the end of one run."""

    def __init__(self, run_dir: Path, run: RunSpec, say: Callable[[str], None]) -> None:
        self._run_dir, self._run, self._say = run_dir, run, say
        self._told = ""
        self._found: str | None = ""
        self._ask_at = 0.0

    def is_over(self) -> bool:
        """Return whether the run has ended and nobody goes on with it. Call this often: Slurm is asked now and then."""
        if not (self._run_dir / "exit.json").exists():
            if self._told:
                self._say("the run goes on")
            self._told, self._ask_at = "", 0.0
            return False
        if not run_directory.goes_on(self._run_dir):
            return True
        if time.monotonic() >= self._ask_at:
            self._found = self._find_next()
            self._ask_at = time.monotonic() + (_ASK_S if self._found else _SOON_S)
        if self._found and self._found != self._told:
            self._say(f"all nodes were taken away; {self._found}")
            self._told = self._found
        return self._found is None

    def _find_next(self) -> str | None:
        """Say who goes on with the run, "" if that is not clear yet; None if nobody does."""
        stays = run_directory.outlives_nodes(self._run)
        if run_liveness.is_front_alive(self._run_dir):
            return "holdfast run asks Slurm for others" if stays else ""  # it is just ending
        job = batch_job_note.read_job(self._run_dir)
        if job and (state := _ask_state(job)) is not None:
            ends = job == run_directory.read_spec(self._run_dir).allocation and not state  # and may queue another yet
            return "" if ends else f"job {job} of Slurm goes on with the run{state}"
        if job and batch_job_note.read_job(self._run_dir) not in (0, job):
            return ""  # the next one was noted meanwhile
        return "" if stays and self._has_just_ended() else None

    def _has_just_ended(self) -> bool:
        try:
            return time.time() < (self._run_dir / "exit.json").stat().st_mtime + _FRONT_S
        except OSError:
            return True  # it has just gone on


def _ask_state(job: int) -> str | None:
    """Return in words why a job of Slurm waits, "" if it runs or Slurm does not tell; None if it is over."""
    from holdfast.fleet.slurm_commands import SlurmCommands
    from holdfast.journal.lease_term import no_lease

    try:
        found = SlurmCommands(os.environ, "/", before_change=no_lease).look([job], ()).jobs.get(job)
    except OSError:
        return ""
    if found is None or found.is_over:
        return None
    return f", and is in the queue{f' ({found.reason})' if found.reason else ''}" if found.is_queued else ""
