"""Ways to keep one training job going on a Slurm cluster, each with the knobs that a good engineer would turn."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks._harness import executable
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.core.decide.node_roles import NodeRole
from holdfast.wire.controller_request import ControllerNotRunning
from tests.slurm.lab import SlurmLab

SCRIPT = Path(__file__).with_name("_cluster_rank.py")
NODES = 3
LIMIT_S = float(os.environ.get("BENCH_LIMIT_S", "240"))  # for anything that should happen
STOP_S = 60.0
_LOOK_S = 0.1
T = TypeVar("T")

# A dead agent is known after 3 s instead of 15, as a silent node of ours is. What restarted ranks could read of the
# ranks before them is in a store of its own.
_MEETING = (
    "--rdzv-backend=c10d --rdzv-endpoint=$(scontrol show hostnames | head -1):29500 --rdzv-id=$SLURM_JOB_ID "
    "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3"
)
_BATCH = """#!/bin/bash
#SBATCH --job-name=train --ntasks-per-node=1 --exclusive --time=60 --open-mode=append
#SBATCH {flags}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
srun {srun} {torchrun} --nnodes={nodes} --nproc-per-node=1 {restarts} {meeting} {script}
"""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of the training script wrote down."""

    at: float
    kind: str
    rank: int
    host: str
    step: int


class Life(msgspec.Struct, frozen=True):
    """One process of the script, from its start."""

    events: list[Event]

    @property
    def started_at(self) -> float:
        return self.events[0].at


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way; `holdfast` has the flags of `holdfast run`, and the others have those of a batch script."""

    name: str
    holdfast: tuple[str, ...] = ()
    flags: str = ""
    srun: str = ""
    restarts: str = ""

    @property
    def is_ours(self) -> bool:
        return bool(self.holdfast)


WAYS = (
    Way(name="holdfast_standby", holdfast=("--standbys", "1")),
    Way(name="holdfast_refill", holdfast=("--standbys", "0")),
    Way(name="torchrun_spare", flags=f"--no-kill --nodes={NODES + 1}", srun="--no-kill", restarts="--max-restarts=100"),
    Way(name="requeue", flags=f"--requeue --nodes={NODES}", srun="--kill-on-bad-exit=1", restarts="--max-restarts=0"),
)


class ClusterJob:
    """The training job on the lab, started in one of the ways."""

    def __init__(self, lab: SlurmLab, way: Way, folder: Path) -> None:
        self.lab, self.way, self.folder = lab, way, folder
        self.events_folder = folder / "events"
        self.events_folder.mkdir()
        self._front: subprocess.Popen[bytes] | None = None
        self._project = folder / "project"  # of its own: what goes to nodes is the script, and not all of our tests
        self._project.mkdir()
        copy = shutil.copy(SCRIPT, self._project / "train.py")
        script = [str(copy), f"--events={self.events_folder}", f"--ckpt={folder / 'checkpoint.pt'}"]
        self._start_holdfast([*script, "--snapshots"]) if way.is_ours else self._submit(script)

    def _start_holdfast(self, script: list[str]) -> None:
        words = [sys.executable, "-m", "holdfast", "run", "--fleet", "slurm", "--nnodes", str(NODES)]
        words += ["--nproc-per-node", "1", "--run-dir", str(self.folder / "run"), "--slurm", "time=60 exclusive"]
        with (self.folder / "job.out").open("wb") as output:
            self._front = subprocess.Popen(
                self.lab.words(*words, *self.way.holdfast, *script, cwd=str(self._project)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment(),
            )

    def _submit(self, script: list[str]) -> None:
        text = _BATCH.format(
            flags=self.way.flags,
            srun=self.way.srun,
            torchrun=executable("torchrun"),
            nodes=NODES,
            restarts=self.way.restarts,
            meeting=_MEETING,
            script=" ".join(script),
        )
        path = self.folder / "train.sbatch"
        path.write_text(text)
        words = self.lab.words("sbatch", f"--output={self.folder}/job.out", str(path), cwd=str(self.folder))
        subprocess.run(words, check=True, env=self._environment(), stdout=subprocess.DEVNULL)

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, **self.lab.env, "OMP_NUM_THREADS": "1", "HOLDFAST_HOME": str(self.folder / "home")}
        return env | {"PYTHONPATH": str(SCRIPT.parents[1])}

    def lives(self) -> list[Life]:
        """All processes of the script so far, by their start."""
        found = []
        for path in self.events_folder.glob("*.jsonl"):
            whole = path.read_bytes().rpartition(b"\n")[0]
            if events := [msgspec.json.decode(line, type=Event) for line in whole.splitlines()]:
                found.append(Life(events))
        return sorted(found, key=lambda life: life.started_at)

    def steps(self, since: float = 0.0) -> dict[int, list[Event]]:
        """The steps of each rank, of processes that were started after this."""
        made: dict[int, list[Event]] = {}
        for life in self.lives():
            for event in life.events if life.started_at > since else ():
                if event.kind == "step":
                    made.setdefault(event.rank, []).append(event)
        return made

    def wait(self, look: Callable[[], T | None]) -> T | None:
        """What `look` finds; None if nothing moves any more."""
        until, seen = time.monotonic() + LIMIT_S, 0
        while time.monotonic() < until:
            if (found := look()) is not None:
                return found
            if (now := len(self.lives())) != seen:  # whoever starts processes is not done yet
                until, seen = time.monotonic() + LIMIT_S, now
            time.sleep(_LOOK_S)
        return None

    def has_spare(self) -> bool:
        """Whether a standby waits, if there is to be one, and copies of the state are on peers."""
        if not self.way.is_ours:
            return True
        try:
            status: dict[str, Any] = ask_controller(self.folder / "run", "/api/v1/status")
        except ControllerNotRunning:
            return False
        waits = any(node["role"] == NodeRole.READY for node in status["nodes"])
        return status["floor"] > 3 and (waits or "0" in self.way.holdfast) and self._zygotes_are_equal()

    def _zygotes_are_equal(self) -> bool:
        """Whether every node's zygote, a standby's too, has as many modules: those of the script come last."""
        logs = [path.read_text(errors="replace") for path in self.folder.glob("run/slurm/*/nodes/*/agent.log")]
        made = [re.findall(r"zygote: (\d+) modules", log)[-1:] for log in logs]
        return len(made) == NODES + int(self.way.holdfast[-1]) and all(made) and made.count(made[0]) == len(made)

    def victim(self) -> str:
        """A host with a rank; not the first of the allocation, which has the batch script and the rendezvous."""
        seated = {events[-1].host for events in self.steps().values()}
        return max(seated, key=lambda host: int(host.rpartition("-")[2]))

    def phases(self) -> str:
        """What our console says of the incident, once it is over."""
        lines = (self.folder / "job.out").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("holdfast: ") and "resumed from" in line), "")

    def last_words(self) -> str:
        lines = (self.folder / "job.out").read_text(errors="replace").splitlines()
        queue = self.lab.call("squeue", "--states=all", check=False)
        return "\n".join([*lines[-12:], queue])

    def stop(self) -> None:
        if self._front is not None and self._front.poll() is None:
            self._front.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._front.wait(STOP_S)
            self._front.kill()
            self._front.wait()
        self.lab.call("scancel", "-u", "root", "-f", check=False)


@contextlib.contextmanager
def run_job(lab: SlurmLab, way: Way) -> Iterator[ClusterJob]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True) as folder:
        job = ClusterJob(lab, way, Path(folder))
        try:
            yield job
        finally:
            job.stop()
            lab.recover(NODES + 1)
