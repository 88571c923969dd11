"""Transcripts of the console: the one place where tests compare what holdfast says word for word."""

import difflib
import os
import re
from pathlib import Path

from tests.cli.driver import Job

FOLDER = Path(__file__).with_name("transcripts")
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d )?\b\d\d:\d\d(:\d\d)?\b")


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


def assert_screens(name: str, screens: dict[str, str]) -> None:
    """What a command shows in each case is what the transcript has; `PYTEST_HOLDFAST_REWRITE=1` writes it anew."""
    path, told = FOLDER / f"{name}.txt", ""
    for case, screen in screens.items():
        lines = (" ".join(line.split()) for line in _CLOCK.sub("CLOCK", screen).splitlines())
        told += "\n".join([f"--- {case}", *lines, "", ""])
    if os.environ.get("PYTEST_HOLDFAST_REWRITE"):
        path.write_text(told)
    differs = [*difflib.unified_diff(path.read_text().splitlines(), told.splitlines(), str(path), "shown", lineterm="")]
    assert not differs, "\n".join(differs)
