"""Transcripts of the console: the one place where tests compare what holdfast says word for word."""

import re
from pathlib import Path

from tests.cli.driver import Job

FOLDER = Path(__file__).with_name("transcripts")


def mask_line(line: str, job: Job) -> str:
    """A sentence without what differs from run to run: paths, numbers, and where time went."""
    bare = line.replace(str(job.run_dir), "RUN").replace(str(job.folder), "FOLDER")
    bare = re.sub(r"\d+(\.\d+)?", "N", re.sub(r"\(detect [^)]*\)", "(...)", bare))
    return re.sub(r"\blost N steps?\b", "lost N steps", bare)


def assert_transcript(job: Job, name: str) -> None:
    """Every line of the transcript was said, in this order; a busy machine may have given reason to say more."""
    wanted = (FOLDER / f"{name}.txt").read_text().splitlines()
    said = [mask_line(line, job) for line in job.sentences()]
    left = iter(said)
    missed = [line for line in wanted if line not in left]
    assert not missed, "\n".join([f"not said: {missed[0]}", *said])
