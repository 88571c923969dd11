"""Starting jobs, and ending those that a failed test has left."""

import signal
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from holdfast.wire import program_fork_server
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.driver import TRAIN, Job
from tests.cli.page_in_browser import browser, journal  # noqa: F401  fixtures
from tests.cli.page_journals import written  # noqa: F401  fixture
from tests.conftest import MARK, job_environment, kill_marked

Start = Callable[..., Job]


@pytest.fixture
def start(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    warm_server: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_orphans: str,
) -> Iterator[Start]:
    """Start a job: start(flag, ..., script="...") runs the script, by default TRAIN.

    From the fork server that all jobs share, unless one has an environment that may change what is imported; and
    without probes where they are not the matter. Ranks are forked where their script needs torch.
    """
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    quick = request.node.get_closest_marker("slow") is None
    yield from starting(tmp_path, warm_server, no_orphans, quick=quick)


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory, warm_server: Path) -> Iterator[Start]:
    """Start a job that the tests of a module share, because they only look at it; it is killed when they are over."""
    folder, mark = tmp_path_factory.mktemp("shared"), uuid.uuid4().hex
    own = {MARK: mark, "HOLDFAST_HOME": str(folder / "home")}
    starts = starting(folder, warm_server, mark, quick=True)
    begin = next(starts)
    yield lambda *flags, **given: begin(*flags, **(own | given))
    starts.close()


def starting(folder: Path, warm_server: Path, mark: str, *, quick: bool) -> Generator[Start, None, None]:
    jobs: list[Job] = []

    def start(
        *flags: str,
        script: str = TRAIN,
        zygote: bool = False,
        probes: bool = False,
        name: str = "job",
        executed: bool = False,
        **env: str,
    ) -> Job:
        (folder / f"{name}.py").write_text(script)
        untried = () if probes else ("--set", "probe.allow=false")
        run_dir = ("--run-dir", str(folder / "run"))
        fresh = () if zygote or "import torch" in script else ("--no-zygote",)
        words = (*run_dir, *fresh, *untried, *flags, f"{name}.py", str(folder))
        changing = [key for key in env if not key.startswith("HOLDFAST_") and key != "KUBECONFIG"]
        cheap = not (quick and changing) or "OWN_SERVER" in changing
        assert cheap, "six seconds of a processor; or name it HOLDFAST_..."
        shared = {} if changing else {program_fork_server.NAMED: str(warm_server)}
        environment = make_rank_environment(job_environment()) | env | shared
        jobs.append(Job(folder, *words, env=environment, name=name, executed=executed or not shared))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGKILL)
                job.process.wait()
                kill_marked(mark)
