"""Jobs of public scripts: each has a folder of its own, as a user's project has."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.wire import program_fork_server
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.driver import Job
from tests.conftest import job_environment, kill_marked
from tests.public.table import Script

HERE = Path(__file__).parent / "scripts"
# A rank that is stopped is acted on at once, but nobody is looked at before this.
SOON = ("--set", "hang.least_s=1", "--set", "hang.again_s=0.3", "--set", "probe.allow=false")
LaunchPublic = Callable[..., Job]


@pytest.fixture
def launch(
    tmp_path: Path, warm_server: Path, monkeypatch: pytest.MonkeyPatch, no_orphans: str
) -> Iterator[LaunchPublic]:
    """launch(script, name, place) runs it as it lies in `proj`, where it is put the first time."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    jobs: list[Job] = []

    def launch(script: Script, name: str = "job", place: str = "work") -> Job:
        folder = tmp_path / place
        (folder / "proj").mkdir(parents=True, exist_ok=True)
        if not (folder / script.path).exists():
            shutil.copy(HERE / f"{script.name}.py", folder / script.path)
        words = ("--run-dir", str(folder / "run"), *SOON, *script.flags, script.path, *script.args)
        env = make_rank_environment(job_environment()) | {program_fork_server.NAMED: str(warm_server)}
        jobs.append(Job(folder, *words, env=env, name=name))
        return jobs[-1]

    yield launch
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
            kill_marked(no_orphans)
