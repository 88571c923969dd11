"""A job whose front is at the login host of a lab, and whose nodes are steps there."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.fleet.slurm_node_file import read_records
from holdfast.fleet.slurm_node_presence import NodeRecord
from holdfast.wire.rank_environment_defaults import make_rank_environment
from tests.cli.driver import TRAIN, Job
from tests.conftest import job_environment, kill_marked
from tests.slurm.lab import LOGIN, SlurmLab, lacking, running

HOLDFAST = (sys.executable, "-m", "holdfast.cli")


class SlurmJob(Job):
    def __init__(
        self,
        lab: SlurmLab,
        folder: Path,
        *words: str,
        env: dict[str, str],
        name: str = "job",
        at: str = LOGIN,
        inside: tuple[str, ...] = (),
    ) -> None:
        self.lab, self.at, self.inside = lab, at, inside  # where people type, and what runs our command
        super().__init__(folder, *words, env=env, name=name)
        self.patience_s = 90.0  # nodes start as fresh interpreters

    def start(self, *words: str) -> None:
        if self._started:
            self.process.wait()
        self._started = True
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.lab.words(*self.inside, *HOLDFAST, "run", *words, on=self.at, cwd=str(self.folder)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._env,
            )

    def _signs(self) -> object:
        logs = [file.stat().st_size for file in (self.run_dir / "slurm").glob("*.log")]
        return super()._signs(), logs

    def story(self) -> str:
        logs = sorted((self.run_dir / "slurm").glob("*.log"))
        more = "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
        return f"{super().story()}\n{more}\n--- squeue\n{self.lab.call('squeue', '--states=all')}"

    def records(self) -> dict[str, NodeRecord]:
        return read_records(self.run_dir / "slurm").nodes

    def host_of(self, node: str) -> str:
        return self.until(lambda: (found := self.records().get(node)) and found.host, f"a host for {node}") or ""

    def node_of_rank(self, rank: int) -> str:
        """The node on which a rank runs now."""
        return next(str(node["node"]) for node in self.status()["nodes"] if node["ranks"] == str(rank))

    def host_of_rank(self, rank: int) -> str:
        return self.host_of(self.node_of_rank(rank))

    def standby_waits(self) -> None:
        self.until(lambda: any(node["role"] == "ready" for node in self.status()["nodes"]), "a standby")

    def queue(self) -> list[str]:
        """The jobs that Slurm has not ended."""
        return self.lab.call("squeue", "-h", "-o", "%i").split()


class StartSlurm:
    """Starts jobs at the login host: start_slurm(flag, ..., script="...") runs the script, by default TRAIN."""

    def __init__(self, lab: SlurmLab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.env = make_rank_environment(job_environment()) | lab.env
        self.jobs: list[SlurmJob] = []

    def __call__(
        self, *flags: str, script: str = TRAIN, name: str = "job", inside: tuple[str, ...] = (), **env: str
    ) -> SlurmJob:
        (self.folder / f"{name}.py").write_text(script)
        fresh = () if "import torch" in script else ("--no-zygote",)
        words = ("--fleet", "slurm", "--run-dir", str(self.folder / "run"), *fresh, "--set", "probe.allow=false")
        words = (*words, *flags, f"{name}.py", str(self.folder))
        self.jobs.append(SlurmJob(self.lab, self.folder, *words, env=self.env | env, name=name, inside=inside))
        return self.jobs[-1]

    def call_holdfast(self, *words: str, **env: str) -> str:
        """Run one of our commands at the login host, and return what it prints."""
        return self.lab.call(*HOLDFAST, *words, on=LOGIN, cwd=str(self.folder), check=True, **self.env, **env)


@pytest.fixture
def start_slurm(
    tmp_path: Path, slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch, no_orphans: str
) -> Iterator[StartSlurm]:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    start = StartSlurm(slurm_lab, tmp_path)
    yield start
    for job in start.jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()
            kill_marked(no_orphans)
    slurm_lab.call("scancel", "-u", "root", "-f", check=False)
    slurm_lab.recover()


@contextlib.contextmanager
def jobs_in_own_lab(folder: Path, patch: pytest.MonkeyPatch, lab: SlurmLab) -> Iterator[StartSlurm]:
    """Jobs in a Slurm that only one test has; skips where none can run."""
    if why := lacking():
        pytest.skip(why)
    patch.setenv("HOLDFAST_HOME", str(folder / "home"))
    with running(lab):
        start = StartSlurm(lab, folder)
        yield start
        for job in start.jobs:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGKILL)
                job.process.wait()
        lab.call("scancel", "-u", "root", "-f", check=False)
