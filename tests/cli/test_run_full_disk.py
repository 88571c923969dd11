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


SMALL = (
    'mount -t tmpfs -o size=1m,mode=0700 tmpfs "$1" && head -c 40k /dev/zero > "$1/fill" && shift 1 '
    '&& exec "$0" -m holdfast run "$@"'
)


@pytest.mark.parametrize("flag", ["--run-dir", "--log-dir"])
def test_a_run_is_refused_where_there_is_no_room(tmp_path: Path, no_orphans: str, flag: str) -> None:
    if not may_mount():
        pytest.skip("file systems cannot be mounted here, not even in a namespace of one's own")
    disk, home, script = tmp_path / "disk", tmp_path / "home", tmp_path / "ok.py"
    disk.mkdir()
    script.write_text("raise SystemExit('never run')\n")
    where = str(disk / "one")
    words = [*ALONE, "sh", "-c", SMALL, sys.executable, str(disk), flag, where, "--standalone", str(script)]
    env = job_environment(HOLDFAST_HOME=str(home))
    done = subprocess.run(words, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    [said] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert where in said and said.endswith(f"free some, or give another {flag}")
    assert not list(home.glob("runs/*")), "nothing is left of it"
