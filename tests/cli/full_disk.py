"""A job whose run directory lies on a disk of its own, which fills up; to be run where it may be mounted:

unshare -Urm python -m tests.cli.full_disk FOLDER
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.core.decide.incident_course import ENDED_FOR_ROOM
from holdfast.core.incident.full_disks import name_disk
from holdfast.core.record.solving_rungs import Rung, rung_of
from tests.cli.driver import TRAIN, Job, gone


def fill(disk: Path) -> Path:
    path = disk / "fill"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    return path


def main(folder: Path) -> None:
    disk = folder / "run"  # where the driver looks
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(disk)], check=True)
    (folder / "job.py").write_text(TRAIN)
    # It writes to its journal once a second.
    settings = ("--set", "recovery.wait_s=30", "--set", "node.lost_s=12", "--set", "pace.progress_s=1")
    flags = ("--run-dir", str(disk), "--no-zygote", *settings)
    job = Job(folder, *flags, "job.py", str(folder), env=dict(os.environ))
    try:
        told(job, disk)
    finally:
        job.process.send_signal(signal.SIGINT)
        job.process.wait(60)


def told(job: Job, disk: Path) -> None:
    job.trains()
    rank, controller = job.rank(0), job.controller()
    filled = fill(disk)  # it ends by itself
    job.says(f"the disk that holds {disk} is full, ")
    filled.unlink()
    job.trains()
    assert job.rank(0) == rank and not gone(rank), "training went on"
    assert job.controller() != controller
    assert sum("is full" in line for line in job.sentences()) == 1, job.sentences()
    blamed(job, disk)
    filled = fill(disk)
    os.kill(job.controller(), signal.SIGKILL)
    job.says(f"holdfast run --resume {disk}")
    job.until(lambda: job.process.poll() is not None, "the end")
    assert job.process.returncode == 1 and not (disk / "exit.json").exists()
    filled.unlink()
    job.start("--resume", str(disk))
    job.trains(generation=3)
    job.finish()
    job.ends(0)


def blamed(job: Job, disk: Path) -> None:
    """All nodes have ended by the time that there is room: for the disk, and for no fault of theirs."""
    node = Path(f"/proc/{job.rank(0)}")
    filled = fill(disk)
    job.until(lambda: not node.exists(), "the end of the ranks, as nobody leads them")
    filled.unlink()
    job.trains(generation=2)
    [record] = job.report().incidents
    failed = record.cause.partition(": ")[2]
    assert failed and record.cause == name_disk(str(disk), failed) and record.label == "full disk", record
    assert record.evicted and set(record.ordered.values()) == {ENDED_FOR_ROOM}, record
    assert rung_of(record) is Rung.RESTART


if __name__ == "__main__":
    main(Path(sys.argv[1]))
