"""The disk of the run directory is full: a person is told which, and what to do; training goes on meanwhile."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, job_environment

pytestmark = pytest.mark.e2e
ALONE = ("unshare", "-Urm")


def may_mount() -> bool:
    try:
        words = [*ALONE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        subprocess.run(words, check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, no_orphans: str) -> None:
    if not may_mount():
        pytest.skip("file systems cannot be mounted here, not even in a namespace of one's own")
    env = job_environment(HOLDFAST_HOME=str(tmp_path / "home"))
    words = [*ALONE, sys.executable, "-m", "tests.cli.full_disk", str(tmp_path)]
    done = subprocess.run(words, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-5000:]
