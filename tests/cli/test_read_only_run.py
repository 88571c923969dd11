"""Runs on storage that has become read-only: whoever looks at them is told what there is, as root, too."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Start
from tests.cli.driver import TRAIN
from tests.conftest import ROOT, job_environment, kill_marked
from tests.journal.test_read_only_storage import FROZEN

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
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
    words = ["unshare", "-rm", "sh", "-c", FROZEN, str(frozen), *program]
    env = job_environment(HOLDFAST_HOME=str(frozen))
    done = subprocess.run(words, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert not any("Traceback (most" in said or "cannot be used" in said for _, said in found.values())
    assert found["writable"][0] == 0

    assert "ended with code 1" in found["ls"][1] and "left: no controller" in found["ls"][1]
    for name in ("killed", "bare"):
        code, said = found[f"{name} report"]
        assert code == 0 and "0 incidents" in said and "it has no controller now" in said
        assert "generation 1" in said
        assert "has no controller now" in found[f"{name} status"][1]
        assert "has no controller now" in found[f"{name} trace"][1]
        assert "no rank of" in found[f"{name} diagnose"][1]
        assert '"generation":1' in found[f"{name} dash"][1]
    assert found["bare report"][1].replace("bare", "killed") == found["killed report"][1]
    code, said = found["ended report"]
    assert code == 0 and "1 incident" in said
    assert "the end of the world" in found["ended diagnose"][1]
    assert "has ended with code" in found["ended status"][1] and "has ended with code" in found["ended trace"][1]
    assert "the end of the world" in found["ended dash"][1]


def _copy(source: str, target: str) -> str:
    return shutil.copy2(source, target) if Path(source).is_file() else target
