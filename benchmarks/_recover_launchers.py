"""Launchers that one script runs under, each as it is documented and with the settings that let it recover soonest."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks._harness import STANDBY_LIMIT_S, START_LIMIT_S, Job, executable, free_port, holdfast, is_listening
from holdfast.cli.run_dirs.controller_client import ask_controller
from holdfast.core.decide.node_roles import NodeRole
from holdfast.wire.controller_request import ControllerNotRunning

OTHERS = Path(sys.prefix, "peers")  # where `make bench-recovery` puts the launchers of others
OLDER = Path(sys.prefix, "peers-dlrover")  # and the torch that DLRover needs
RESTARTS = 100
TIMEOUT_S = 20.0  # of a collective, for those who see a hang by nothing else; torch's own is 30 minutes
HEARTBEAT_S = 10.0

# Without this, restarted ranks may read the keys of the ranks before them and never find each other.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Launcher(msgspec.Struct, frozen=True, kw_only=True):
    """How a job of 4 ranks is started, and with which flags of the script."""

    name: str
    command: tuple[str, ...]
    nodes: int = 2
    env: Mapping[str, str] = {}
    script: tuple[str, ...] = ()
    leaves: str = ""  # what it makes outside of the job's folder and does not remove


def launchers() -> tuple[list[Launcher], dict[str, str]]:
    """Those that are here, and why others are not."""
    found, skipped = [], {}
    timeout = f"--timeout={TIMEOUT_S:g}"
    if torchrun := executable("torchrun"):
        found.append(Launcher(name="torchrun", command=(torchrun,), env=FRESH_STORE, script=(timeout,)))
    if (OTHERS / "nvidia_resiliency_ext").exists():
        limits = (
            f"--ft-initial-rank-heartbeat-timeout={START_LIMIT_S:g}",
            f"--ft-rank-heartbeat-timeout={HEARTBEAT_S:g}",
        )
        found.append(
            Launcher(
                name="ft_launcher",
                command=(sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", *limits),
                env={**FRESH_STORE, "PYTHONPATH": str(OTHERS)},
                script=("--heartbeats",),
            )
        )
    else:
        skipped["ft_launcher"] = f"nvidia-resiliency-ext is not in {OTHERS.name}; `make bench-recovery` installs it"
    if (OTHERS / "dlrover").exists() and (OLDER / "torch").exists():
        name = f"holdfast-bench-{os.getpid()}"
        paths = os.pathsep.join(map(str, (OLDER, OTHERS)))
        found.append(
            Launcher(
                name="dlrover-run",
                command=(sys.executable, "-m", "dlrover.trainer.torch.main"),
                nodes=1,
                env={"PYTHONPATH": paths, "ELASTIC_JOB_NAME": name},
                script=(timeout,),
                leaves=f"/tmp/ckpt_sock/{name}",
            )
        )
    else:
        skipped["dlrover-run"] = f"DLRover, or the torch 2.8 that it needs, is not in {OLDER.name}"
    if executable("holdfast"):
        found.append(Launcher(name="holdfast", command=()))
    else:
        skipped["holdfast"] = "there is no holdfast beside this python"
    return found, skipped


class Running:
    """A job under one of them."""

    def __init__(self, job: Job, launcher: Launcher) -> None:
        self.job, self.launcher = job, launcher
        self.run_dir = job.folder / "run"
        self._agent: list[str] = []
        self._env = dict(launcher.env)

    def start(self) -> None:
        temporary = self.job.folder / "tmp"
        temporary.mkdir()
        self._env |= {"TMPDIR": str(temporary), "DLROVER_EVENT_FILE_DIR": str(temporary)}
        per_node = f"--nproc-per-node={self.job.ranks // self.launcher.nodes}"
        shape = [f"--nnodes={self.launcher.nodes}", per_node, f"--max-restarts={RESTARTS}"]
        if self.launcher.name == "holdfast":
            # The faults here say nothing of the nodes that they strike, however often: each is judged by itself.
            alone = "--set=recovery.window_s=0.001"
            self._spawn(holdfast(self.run_dir, *shape, "--standbys=1", alone))
        elif self.launcher.nodes == 1:
            self._spawn([*self.launcher.command, "--standalone", *shape[1:]])
        else:
            self._start_agents(shape)

    def lose_node(self, rank: int) -> None:
        """Kill all that runs on the node of this rank; what takes its place was started before."""
        victim = self.job.pid_of(rank)
        above = {process.pid for process in psutil.Process(victim).parents()}
        if self.launcher.name == "holdfast":
            holders = {int(path.read_text()) for path in self.run_dir.glob("nodes/*/holder.pid")}
            self.job.kill(*(above & holders))  # and the kernel all below it
            return
        agent = next(one for one in self.job.launchers if one.pid in above)
        self.job.kill(agent.pid, *(child.pid for child in psutil.Process(agent.pid).children(recursive=True)))

    def replace_node(self) -> None:
        """Where there are no standbys, somebody starts another agent by hand, at once."""
        if self._agent:
            self._spawn(self._agent)

    def await_standby(self) -> None:
        """Ours only: the one that was used up before is refilled."""
        if self.launcher.name == "holdfast":
            found = self.job.wait(lambda: self._has_standby() or None, STANDBY_LIMIT_S)
            if not found:
                raise RuntimeError("no standby came")

    def stop_rank(self, rank: int) -> None:
        victim = self.job.pid_of(rank)
        if not self.job.owns(victim):
            raise RuntimeError(f"rank {rank} is gone already")
        os.kill(victim, signal.SIGSTOP)

    def _start_agents(self, shape: list[str]) -> None:
        port = free_port()
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id=bench{port}"]
        self._agent = [*self.launcher.command, *shape, *meeting]
        self._spawn(self._agent)
        # The first agent keeps the rendezvous: it must be the one that is not lost, or the job is.
        self.job.wait(lambda: is_listening(port) or None, START_LIMIT_S)
        for _ in range(self.launcher.nodes - 1):
            self._spawn(self._agent)

    def _has_standby(self) -> bool:
        try:
            status: dict[str, Any] = ask_controller(self.run_dir, "/api/v1/status")
        except ControllerNotRunning:
            return False
        return any(node["role"] == NodeRole.READY for node in status["nodes"])

    def _spawn(self, launch: list[str]) -> subprocess.Popen[bytes]:
        return self.job.start([*launch], self._env, self.launcher.script)
