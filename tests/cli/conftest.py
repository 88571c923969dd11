"""Starting jobs, and ending those that a failed test has left."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.wire import program_fork_server
from holdfast.wire.inherited_environment import make_rank_environment
from tests.cli.driver import TRAIN, Job
from tests.conftest import job_environment, kill_marked

Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path, warm_server: Path, monkeypatch: pytest.MonkeyPatch, no_orphans: str) -> Iterator[Start]:
    """Start a job: start(flag, ..., script="...") runs the script, by default TRAIN.

    From the fork server that all jobs share, unless one has an environment that may change what is imported; and
    without probes where they are not the matter. Ranks are forked where their script needs torch.
    """
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    jobs: list[Job] = []

    def start(
        *flags: str, script: str = TRAIN, zygote: bool = False, probes: bool = False, name: str = "job", **env: str
    ) -> Job:
        (tmp_path / f"{name}.py").write_text(script)
        untried = () if probes else ("--set", "probe.allow=false")
        run_dir = ("--run-dir", str(tmp_path / "run"))
        fresh = () if zygote or "import torch" in script else ("--no-zygote",)
        words = (*run_dir, *fresh, *untried, *flags, f"{name}.py", str(tmp_path))
        changing = [key for key in env if not key.startswith("HOLDFAST_") and key != "KUBECONFIG"]
        shared = {} if changing else {program_fork_server.NAMED: str(warm_server)}
        jobs.append(Job(tmp_path, *words, env=make_rank_environment(job_environment()) | env | shared, name=name))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
            kill_marked(no_orphans)
