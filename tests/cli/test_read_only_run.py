"""Runs on storage that has become read-only: whoever looks at them is told what there is, as root, too."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import TRAIN
from tests.conftest import ROOT, job_environment, kill_marked
from tests.journal.test_read_only_storage import FROZEN

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
CHANGING = ("ls", "releases", "dash")  # tell how long ago something was
FAILING = TRAIN.replace("    holdfast.step", "    assert step < 40, 'the end of the world'\n    holdfast.step")


def test_commands_that_look_at_runs_on_a_read_only_mount(start: Start, tmp_path: Path, no_orphans: str) -> None:
    """One that has ended with a failure, one whose processes were all killed, and the same without shared memory."""
    frozen = tmp_path / "home"
    ended = start("--run-dir", str(frozen / "ended"), "--max-restarts", "0", script=FAILING, name="failing")
    ended.until(lambda: ended.process.poll() is not None, "the end of the job")
    killed = start("--run-dir", str(frozen / "killed"))
    killed.run_dir = frozen / "killed"
    killed.trains()
    killed.process.send_signal(signal.SIGKILL)
    kill_marked(no_orphans)
    killed.process.wait()
    assert (killed.run_dir / "journal.db-wal").stat().st_size, "it has ended well"
    shutil.copytree(killed.run_dir, bare := frozen / "bare", symlinks=True, copy_function=_copy)
    (bare / "journal.db-shm").unlink()

    runs = [str(frozen / name) for name in ("ended", "killed", "bare")]
    program = [sys.executable, "-m", "tests.cli.read_only_commands", str(frozen), *runs]
    found = _found(["unshare", "-rm", "sh", "-c", FROZEN, str(frozen), *program], frozen)
    assert found.pop("writable") == [0, ""]
    assert found["killed report"] == [0, found["bare report"][1].replace("bare", "killed")]
    assert "AssertionError" in found["ended report"][1] and "AssertionError" in found["ended diagnose"][1]
    assert json.loads(found["killed dash"][1])["sections"]["head"]["generation"] == 1
    written = _found(program, frozen)  # where they may write, they say the same
    for name, (code, said) in found.items():
        assert code == written[name][0] and (name.split()[-1] in CHANGING or said == written[name][1]), name


def _found(words: list[str], home: Path) -> dict[str, list[Any]]:
    env = job_environment(HOLDFAST_HOME=str(home))
    done = subprocess.run(words, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


def _copy(source: str, target: str) -> str:
    return shutil.copy2(source, target) if Path(source).is_file() else target
