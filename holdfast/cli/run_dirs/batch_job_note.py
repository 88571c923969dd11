"""The note beside a run directory that names the Slurm job which carries the run, or will. `holdfast sbatch` and its
script write it."""

from pathlib import Path


def note_path(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.job")


def read_job(run_dir: Path) -> int:
    """Return the id of the job that carries a run or waits to; 0 if none does, or the run is not one of a batch job."""
    try:
        text = note_path(run_dir).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0
