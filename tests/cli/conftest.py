"""Starting jobs, and ending those that a failed test has left."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.driver import ROOT, TRAIN, Job
from tests.conftest import kill_marked

# torch takes seconds to import, and of it the store process alone uses anything in these jobs: a port.
PORT_ONLY = """
import socket
class TCPStore:
    def __init__(self, host, port, *, master_listen_fd, **rest):
        self.port, self._socket = port, socket.socket(fileno=master_listen_fd)
"""


@pytest.fixture(scope="session")
def port_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stand-in for torch that has a store and nothing else."""
    folder = tmp_path_factory.mktemp("torch")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "distributed.py").write_text(PORT_ONLY)
    return folder


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path, port_only: Path, monkeypatch: pytest.MonkeyPatch, no_orphans: str) -> Iterator[Start]:
    """Start a job: start(flag, ..., script="...") runs the script, by default TRAIN.

    Without torch where the script does without it, and without probes where they are not the matter: both take seconds.
    """
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    for name in ("HOLDFAST_TOKEN", "HOLDFAST_TOKEN_FILE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    jobs: list[Job] = []

    def start(
        *flags: str, script: str = TRAIN, torch: bool = False, probes: bool = False, name: str = "job", **env: str
    ) -> Job:
        (tmp_path / f"{name}.py").write_text(script)
        path = str(ROOT) if torch else f"{port_only}:{ROOT}"
        zygote = () if torch else ("--no-zygote",)
        untried = () if probes else ("--set", "probe.allow=false")
        run_dir = ("--run-dir", str(tmp_path / "run"))
        words = (*run_dir, *zygote, *untried, *flags, f"{name}.py", str(tmp_path))
        jobs.append(Job(tmp_path, *words, env={**os.environ, "PYTHONPATH": path, **env}, name=name))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
            kill_marked(no_orphans)
