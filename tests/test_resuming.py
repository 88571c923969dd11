"""A run of tests that goes on where it was: what has passed is left out, what failed comes again."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import job_environment

TESTS = "def test_good(): pass\ndef test_bad(): assert not __import__('os').path.exists('bad')\n"


@pytest.mark.e2e
def test_what_has_passed_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "bad").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]")
    assert "1 failed, 1 passed" in run(tmp_path)
    (tmp_path / "bad").unlink()
    assert "1 passed, 1 deselected" in run(tmp_path)
    assert "2 deselected" in run(tmp_path)
    kept = (tmp_path / "passed").read_text().splitlines()
    (tmp_path / "passed").write_text("\n".join(["what was passed with other files", *kept[1:]]))
    assert "2 passed" in run(tmp_path)


@pytest.mark.e2e
def test_what_a_shorter_run_recorded_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "bad").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]")
    assert "1 failed, 1 passed" in run(tmp_path, "--record")
    assert "1 failed, 1 passed" in run(tmp_path, "--record"), "it leaves nothing out"
    assert "1 failed, 1 deselected" in run(tmp_path)


def run(folder: Path, option: str = "--resume") -> str:
    """How it ended; in one process of its own, and without settings of ours."""
    words = ["-p", "tests.resuming", option, "passed", "-p", "no:cacheprovider"]
    argv = [sys.executable, "-m", "pytest", "-q", *words, "test_it.py"]
    env = job_environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[-1]
