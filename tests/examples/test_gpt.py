"""The example trains, and what it resumes ends in the same weights, bit for bit, as what was never disturbed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.client.conftest import Zygote

SCRIPT = Path(__file__).parents[2] / "examples" / "gpt.py"
RANKS = 4  # with two, sums come out alike in any order, and nothing would be shown


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            yield launcher
        finally:
            ranks = psutil.Process(launcher.pid).children(recursive=True) if launcher.poll() is None else []
            launcher.kill()
            for rank in ranks:
                rank.kill()


def torchrun(*args: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", *script(*args)]


def script(*args: str) -> list[str]:
    return [str(SCRIPT), *args]


def finish(command: list[str]) -> str:
    """Run to the end, and return all it said."""
    with started(command) as launcher:
        said, _ = launcher.communicate()
    assert launcher.returncode == 0, said
    return said


def lose_rank(command: list[str], rank: int, at_step: int) -> None:
    """Run until this step is done, kill this rank, and wait for the end that this brings about."""
    with started(command) as launcher:
        assert launcher.stdout
        for line in launcher.stdout:
            if line.startswith(f"step {at_step} "):
                os.kill(pid_of(rank, launcher.pid), signal.SIGKILL)
                break
        else:
            pytest.fail("it ended before the step came")
        launcher.communicate()
    assert launcher.returncode != 0


def pid_of(rank: int, launcher: int) -> int:
    ranks = psutil.Process(launcher).children(recursive=True)
    return next(process.pid for process in ranks if process.environ().get("RANK") == str(rank))


def weights(said: str) -> str:
    found = re.search("^weights sha256: ([0-9a-f]{64})$", said, re.MULTILINE)
    assert found, said
    return found[1]


@pytest.mark.e2e
def test_alone_in_a_rank(warm: Zygote, tmp_path: Path) -> None:
    def run(*more: str) -> str:
        ended = warm.run(*script("--steps", "4", "--ckpt", str(tmp_path), "--ckpt-every", "2"), *more)
        assert ended.code == 0, ended
        return ended.out

    first = run("--out", str(tmp_path / "weights.pt"))
    assert "step 4 loss" in first and (tmp_path / "weights.pt").stat().st_size > 0
    again = run()
    assert " step 4\n" in again and "loss" not in again
    assert weights(again) == weights(first)


@pytest.mark.e2e
@pytest.mark.slow
def test_alone(tmp_path: Path) -> None:
    python = [sys.executable, *script("--steps", "4", "--ckpt", str(tmp_path), "--ckpt-every", "2")]
    first = finish([*python, "--out", str(tmp_path / "weights.pt")])
    assert "step 4 loss" in first and (tmp_path / "weights.pt").stat().st_size > 0
    again = finish(python)  # all steps are done: it restores, and says the same
    assert " step 4\n" in again and "loss" not in again
    assert weights(again) == weights(first)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)  # two runs by torchrun, one with a restart
def test_resumes_exactly(tmp_path: Path) -> None:
    undisturbed = finish(torchrun("--steps", "24"))
    disturbed = torchrun("--steps", "24", "--ckpt", str(tmp_path))
    lose_rank(disturbed, rank=2, at_step=13)
    resumed = finish(disturbed)
    assert re.search("^resumed from step [12]0$", resumed, re.MULTILINE), resumed
    assert weights(resumed) == weights(undisturbed)
