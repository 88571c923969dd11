"""Jobs that chaos starts on this host, with machines, disks and storage that it may damage."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast.chaos import faulty_storage, linux_namespaces
from holdfast.chaos.hardware_faults import NVML
from holdfast.chaos.injection_records import CannotInject
from holdfast.chaos.job_observer import JobObserver
from holdfast.chaos.rank_orders import PRELOAD
from holdfast.chaos.scenario import ScenarioJob

_MACHINES = 64
_UP_S = 240.0
_END_S = 60.0
_PR_SET_PDEATHSIG = 1
_MIB = 1 << 20


class LabJob:
    """A job that chaos started, and the folder that holds all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.run_dir = folder / "run"
        self.output = folder / "output"
        self.links: Path | None = None
        self.fronts: list[subprocess.Popen[bytes]] = []
        self.spaces: list[int] = []  # network namespaces of hosts

    def observe_job(self) -> JobObserver:
        """Wait until the job is up and return its observer; raises CannotInject if the job does not start."""
        until = time.monotonic() + _UP_S
        while (run_dir := self._leader_run_dir()) is None:
            if self.fronts[0].poll() is not None or time.monotonic() > until:
                raise CannotInject(f"the job did not start:\n{self.read_output()}")
            time.sleep(0.05)
        if not self.spaces:
            return JobObserver(run_dir)
        return JobObserver(run_dir, self.run_dir, self.spaces[0])

    def _leader_run_dir(self) -> Path | None:
        """Return the run directory that has the controller's address file; None until the controller has written it."""
        run_dir = self.outside_path(self.run_dir)
        if not self.spaces:
            return run_dir if (run_dir / "controller.json").exists() else None
        return next((path.parent for path in run_dir.glob("*/controller.json")), None)

    def command_words(self, job: ScenarioJob) -> list[str]:
        """Return the job's command line with {disk} and {storage} replaced by our paths."""
        storage = f"faulty://{self.folder / 'storage'}"
        return [word.replace("{disk}", str(self.disk)).replace("{storage}", storage) for word in job.run]

    def outside_path(self, path: Path) -> Path:
        """Translate a path inside the job to one that can be opened from outside of the job's mounts."""
        front = self.fronts[0].pid
        return Path(f"/proc/{front}/root{path}") if linux_namespaces.has_own_mounts(front) else path

    def read_output(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.glob("output*")))

    def end_job(self) -> None:
        """End the job: SIGTERM first, then SIGKILL. Each `holdfast run` ends its nodes before itself."""
        for front in self.fronts:
            if front.poll() is None:
                front.send_signal(signal.SIGTERM)
        for front in self.fronts:
            try:
                front.wait(_END_S)
            except subprocess.TimeoutExpired:
                front.kill()
                front.wait()


def start_job(made: LabJob, job: ScenarioJob, env: dict[str, str]) -> None:
    flags, more = job_flags(made, job)
    made.disk.mkdir(exist_ok=True)
    argv = [
        sys.executable,
        "-P",
        "-m",
        "holdfast.cli",
        "run",
        "--run-dir",
        str(made.run_dir),
        *flags,
        *made.command_words(job),
    ]
    try:
        with made.output.open("ab") as output:
            front = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | more | env,
                preexec_fn=functools.partial(_mount_disks, made.disk, job, os.getpid()),  # noqa: PLW1509 - no threads here
            )
    except subprocess.SubprocessError:
        raise CannotInject("private mounts cannot be made here; drop disk_mib and shm_mib") from None
    made.fronts.append(front)


def job_flags(made: LabJob, job: ScenarioJob) -> tuple[list[str], dict[str, str]]:
    """Return the flags and environment that give `holdfast run` the rank hooks, faulty storage and fake machines."""
    flags = ["--preload", PRELOAD]
    control = made.folder / "storage-is"
    control.write_text("ok")
    faulty_storage.register_in(made.folder / "site")
    paths = [str(made.folder / "site")]
    env = {faulty_storage.CONTROL: str(control)}
    if job.machines:
        flags += _make_machines(made.folder / "machines")
        paths.append(str(Path(__file__).parent / "fakes"))
        env[NVML] = str(made.folder / "machines")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH", "")]))
    return flags, env


def _make_machines(machines: Path) -> list[str]:
    """Make a kernel log for every possible node; return the settings that make each node a separate machine."""
    for number in range(_MACHINES):
        (machines / f"n{number}" / "dev").mkdir(parents=True, exist_ok=True)
        (machines / f"n{number}" / "dev/kmsg").touch()
    settings = (f"health.root={machines}/{{node}}", "health.kernel_s=0.5", "health.gpu_s=1", "health.host_s=1")
    return [word for setting in settings for word in ("--set", setting)]


def _mount_disks(disk: Path, job: ScenarioJob, parent: int) -> None:
    """In the child that will become `holdfast run`, mount the job's small disks in a private mount namespace."""
    tie_to_parent(parent)
    if job.disk_mib or job.shm_mib:
        linux_namespaces.make_mounts_private()
    if job.disk_mib:
        linux_namespaces.mount_small_disk(str(disk), job.disk_mib * _MIB)
    if job.shm_mib:
        linux_namespaces.mount_small_disk("/dev/shm", job.shm_mib * _MIB)


def tie_to_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its parent ends. Exit if `parent` has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
