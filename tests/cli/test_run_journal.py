"""A journal that has lost what the nodes were told: it is said, no old answer is believed, and the job goes on."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from holdfast.journal.sqlite_journal import SqliteJournal
from tests.cli.conftest import Start
from tests.cli.driver import Job, gone
from tests.cli.test_order_commands import says

pytestmark = pytest.mark.e2e

FILES = ("journal.mark", "journal.db", "journal.db-wal")  # the mark first: it must not be ahead of the others


def unwatched(job: Job) -> None:
    """Front and controller are gone; the nodes go on for a while."""
    controller = job.controller()
    os.kill(job.process.pid, signal.SIGKILL)
    job.ends(-signal.SIGKILL)
    job.until(lambda: gone(controller), "the end of the controller")


def epoch(run_dir: Path) -> int:
    journal = SqliteJournal(run_dir / "journal.db", read_only=True)
    journal.close()
    return journal.epoch


def test_a_write_ahead_log_that_is_damaged(start: Start) -> None:
    """SQLite drops it without a word; ours are that it did, and what becomes of the ranks."""
    job = start("--nnodes", "2", "--nproc-per-node", "1")
    job.trains()
    ranks = job.ranks(2)
    unwatched(job)
    log = job.run_dir / "journal.db-wal"
    content = bytearray(log.read_bytes())
    content[32 + 24 + 100] ^= 0xFF  # in its first frame, so all after it are dropped too
    log.write_bytes(content)
    job.start("--resume", str(job.run_dir))
    job.says("the journal lost all of its entries (at least ")
    job.says("generation 1 is ended where it still runs")
    job.trains(generation=2)
    assert gone(*ranks)
    assert epoch(job.run_dir) == 2
    job.finish()
    job.ends(0)
    job.check_replay()


@pytest.mark.slow
def test_a_generation_whose_ranks_were_ended_after_what_the_journal_tells(start: Start, tmp_path: Path) -> None:
    """A backup of all three files was put back: nothing is missing, and still nobody is believed to train."""
    job = start("--nnodes", "2", "--nproc-per-node", "1")
    job.trains()
    for name in FILES:
        shutil.copy2(job.run_dir / name, tmp_path / name)
    ranks = job.ranks(2)
    says(job, "hold")
    job.until(lambda: gone(*ranks), "the end of the ranks")
    job.until(lambda: job.phase() == "held", "the hold")
    unwatched(job)
    (job.run_dir / "journal.db-shm").unlink(missing_ok=True)
    for name in FILES:
        shutil.copy2(tmp_path / name, job.run_dir / name)
    job.start("--resume", str(job.run_dir))
    job.says("has no rank any more, and nobody has told how they ended")
    job.trains(generation=2)
    job.finish()
    job.ends(0)
