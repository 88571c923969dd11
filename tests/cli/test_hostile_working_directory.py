"""Commands that are given in a folder where another user has put modules with the names of ours and of Python's."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.commands import sbatch_command
from holdfast.cli.run_flags.run_arguments import parse_run_args
from holdfast.config import Settings
from holdfast.controller.failure_opinions import FailureOpinions
from holdfast.core.record.opinion_requests import JudgedIncident
from holdfast.logs.secret_masking import Masker
from holdfast.model.incident_record import Remedy, Verdict
from tests.cli.driver import ROOT
from tests.cli.test_attacks import as_another
from tests.conftest import job_environment
from tests.controller.test_failure_opinions import CAUSE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]
NAMES = ("holdfast", "types", "msgspec", "runpy", "json", "torch")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /tmp; the files in it are another user's if there is one to be played."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    above = [one for one in folder.parents if one.stat().st_uid == os.getuid() and one.stat().st_mode & 0o077 == 0]
    for one in above:
        one.chmod(0o711)

    def write() -> str:
        for name in NAMES:
            text = f"open({str(folder)!r} + '/pwned-{name}', 'w').close()\nraise SystemExit(77)\n"
            (folder / f"{name}.py").write_text(text)
        return "written"

    assert (as_another(write) if os.getuid() == 0 else write()) == "written"
    monkeypatch.chdir(folder)
    yield folder
    for one in above:
        one.chmod(0o700)


def executed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("pwned-*"))


def environment() -> dict[str, str]:
    return job_environment() | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}


def test_probe(hostile: Path, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("holdfast")), "probe", "--only", "clock", "--budget", "5"]
    done = subprocess.run(
        [*command, "--where", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert (executed(hostile), done.returncode) == ([], 0), done.stdout + done.stderr


def test_a_batch_script(hostile: Path, tmp_path: Path) -> None:
    """It goes to the folder where `holdfast sbatch` was given. There is no Slurm here, so its run ends at once."""
    words = ["--nnodes", "1", "--run-dir", str(tmp_path / "run"), "-m", "this"]
    script = sbatch_command.write_script(parse_run_args(["--fleet", "slurm", *words], {}), words, tmp_path / "run", "r")
    assert f"cd {hostile}" in script
    done = subprocess.run(
        ["bash", "-c", script], env=environment(), capture_output=True, text=True, check=False, timeout=250
    )
    assert (executed(hostile), done.returncode) == ([], 2), done.stdout + done.stderr
    assert done.stderr.startswith("holdfast run: ")


def test_the_opinion_of_a_controller(hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    said: list[str] = []
    opinions = FailureOpinions(Settings(), str(tmp_path), said.append, Masker(hosts=False))
    judged = JudgedIncident(number=1, cause=CAUSE, verdict=Verdict(remedy=Remedy.RESTART, reason=""))
    asyncio.run(opinions._ask_about(judged, lambda alarm: None))
    assert (executed(hostile), said) == ([], [])
