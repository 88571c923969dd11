"""Durations, steps, ETTR and counts in words, as all commands write them."""

from typing import Any

from holdfast.core.record.job_account import FROM_START
from holdfast.core.snapshots.checkpoint_reports import NO_CHECKPOINT
from holdfast.linux.local_time import clock_text as clock_text
from holdfast.model.stored_checkpoint_report import StorageReport


def duration_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


FIRST_STEP = "training: first step"
NO_STEP = "no step was seen: no torch optimizer made one, and the script never called holdfast.step"
START_S = 60.0  # ranks that have run for less may not have come to their first step


def no_step_said(run_s: float, *, over: bool, early_end: str = "") -> str:
    """Say that the job has made no step; "" if no rank has run. After START_S, or at the end, also say why. `early_end`
    says that it was "stopped" or "ended" before its ranks had come to their end."""
    if over and early_end and run_s < START_S:
        far = f"made a step: they had run for {duration_text(run_s)}" if run_s else "began"
        return f"it {'was ' if early_end == 'stopped' else ''}{early_end} before its ranks {far}"
    if over or run_s >= START_S:
        return NO_STEP if run_s else ""
    return f"no step was seen yet: the ranks have run for {duration_text(run_s)}" if run_s else ""


def phase_said(status: dict[str, Any]) -> str:
    """Return a job's phase in one word; a job that has run for long without any step counts as "running"."""
    if status["phase"] == "starting" and status.get("run_s", 0.0) >= START_S:
        return "running"
    return "ending" if status.get("parted") else str(status["phase"])


def ettr_said(ettr: float | None, at_most: str = "") -> str:
    """Return the ETTR as text; None, for a job that has never reported a step, gives "not known"."""
    return f"ETTR {at_most}{100 * ettr:.1f} %" if ettr is not None else "ETTR not known"


def ettr_of(wall_s: float, ettr: float | None, at_most: str = "") -> str:
    return f"{ettr_said(ettr, at_most)} {'of' if ettr is not None else 'in'} {duration_text(wall_s)}"


def hour_ettr_of(ettr: float | None, at_most: str = "") -> str:
    """Return the ETTR of the last hour as text; "" for a job that is younger than an hour."""
    return f", {at_most}{100 * ettr:.1f} % of the last hour" if ettr is not None else ""


def step_said(step: int, since: str = "") -> str:
    """Return a number of steps as text; -1 means that no step was seen. `step` is the newest step's number or, with
    `since`, the steps made since then. With FROM_START it is the number again, as restarts repeat steps."""
    if step < 0:
        return "no step seen"
    if since == FROM_START:
        return f"step {step}, counted from {since}"
    return f"{counted_noun(step, 'step')} since {since}" if since else f"step {step}"


def storage_said(storage: StorageReport | None, *, unwatched: bool = False) -> str:
    """Return the newest step on storage and on nodes' disks, and why later steps were not written; "" if not known.
    `unwatched`: the job goes on without a controller, so storage may have later checkpoints."""
    if storage is None:
        return ""
    why = storage.missed.why if storage.missed else ""
    if storage.step < 0:
        newest = f"{NO_CHECKPOINT}: {why}" if why else ""
    else:
        newest = f"step {storage.step} was last written to storage, at {clock_text(storage.at)}"
        if storage.doubted:
            newest = f"{newest}, and is in doubt: no run resumes from it (holdfast ckpt ls)"
        if unwatched:
            newest = f"{newest}, as far as the journal tells: later ones may be there (holdfast ckpt ls)"
        newest = f"{newest}; later ones were not: {why}" if why else newest
    on_disk = f"step {storage.disk} lies on the disks of the nodes, in disk.path" if storage.disk >= 0 else ""
    return "; ".join(part for part in (newest, on_disk) if part)


def incidents_text(count: int, failures: int) -> str:
    """Return the number of incidents in words; add the number of failures if some incident had more than one."""
    return counted_noun(count, "incident") + (f" ({counted_noun(failures, 'failure')})" if failures > count else "")


def rate_text(bytes_s: float) -> str:
    """Return a rate with three digits and its unit, such as 1.25 GB/s."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_s >= size:
            return f"{bytes_s / size:.3g} {unit}/s"
    return f"{bytes_s:.0f} B/s"


def counted_noun(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")
