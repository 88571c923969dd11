"""Jobs of our own on this host: with machines, disks and storage that are ours to spoil."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast.chaos import faulty, spaces
from holdfast.chaos.fault import Cannot
from holdfast.chaos.machines import NVML
from holdfast.chaos.orders import PRELOAD
from holdfast.chaos.scenario import Job
from holdfast.chaos.sight import Sight

_MACHINES = 64
_UP_S = 240.0
_END_S = 60.0
_PR_SET_PDEATHSIG = 1
_MIB = 1 << 20


class Made:
    """A job and the folder that holds all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.run_dir = folder / "run"
        self.output = folder / "output"
        self.links: Path | None = None
        self.fronts: list[subprocess.Popen[bytes]] = []
        self.spaces: list[int] = []  # network namespaces of hosts

    def sight(self) -> Sight:
        """Once it can be seen."""
        until = time.monotonic() + _UP_S
        while (run_dir := self._leading()) is None:
            if self.fronts[0].poll() is not None or time.monotonic() > until:
                raise Cannot(f"the job did not start:\n{self.words()}")
            time.sleep(0.05)
        if not self.spaces:
            return Sight(run_dir)
        return Sight(run_dir, self.run_dir, self.spaces[0])

    def _leading(self) -> Path | None:
        """Where the controller is known; every host of a lab has a run directory of its own."""
        run_dir = self.seen(self.run_dir)
        if not self.spaces:
            return run_dir if (run_dir / "controller.json").exists() else None
        return next((path.parent for path in run_dir.glob("*/controller.json")), None)

    def words_of(self, job: Job) -> list[str]:
        """The job's command line with our places in it."""
        storage = f"faulty://{self.folder / 'storage'}"
        return [word.replace("{disk}", str(self.disk)).replace("{storage}", storage) for word in job.run]

    def seen(self, path: Path) -> Path:
        """A path of the job as we see it from outside of its mounts."""
        front = self.fronts[0].pid
        return Path(f"/proc/{front}/root{path}") if spaces.is_apart(front) else path

    def words(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.glob("output*")))

    def end(self) -> None:
        """With grace, then without; a front that is gone has ended all of its nodes."""
        for front in self.fronts:
            if front.poll() is None:
                front.send_signal(signal.SIGTERM)
        for front in self.fronts:
            try:
                front.wait(_END_S)
            except subprocess.TimeoutExpired:
                front.kill()
                front.wait()


def start(made: Made, job: Job, env: dict[str, str]) -> None:
    flags, more = flags_of(made, job)
    made.disk.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "holdfast.cli", "run", "--run-dir", str(made.run_dir), *flags, *made.words_of(job)]
    try:
        with made.output.open("ab") as output:
            front = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | more | env,
                preexec_fn=functools.partial(_before, made.disk, job, os.getpid()),  # noqa: PLW1509 - no threads here
            )
    except subprocess.SubprocessError:
        raise Cannot("mounts that nobody else sees cannot be made here; leave disk_mib and shm_mib out") from None
    made.fronts.append(front)


def flags_of(made: Made, job: Job) -> tuple[list[str], dict[str, str]]:
    """What makes ranks take orders, storage fail, and machines of nodes."""
    flags = ["--preload", PRELOAD]
    control = made.folder / "storage-is"
    control.write_text("ok")
    faulty.known_in(made.folder / "site")
    paths = [str(made.folder / "site")]
    env = {faulty.CONTROL: str(control)}
    if job.machines:
        flags += _machines(made.folder / "machines")
        paths.append(str(Path(__file__).parent / "fakes"))
        env[NVML] = str(made.folder / "machines")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH", "")]))
    return flags, env


def _machines(machines: Path) -> list[str]:
    """A kernel's log for every node there may ever be; settings that make each node a machine of its own."""
    for number in range(_MACHINES):
        (machines / f"n{number}" / "dev").mkdir(parents=True, exist_ok=True)
        (machines / f"n{number}" / "dev/kmsg").touch()
    settings = (f"health.root={machines}/{{node}}", "health.kernel_s=0.5", "health.gpu_s=1", "health.host_s=1")
    return [word for setting in settings for word in ("--set", setting)]


def _before(disk: Path, job: Job, parent: int) -> None:
    """In the child, before it becomes `holdfast run`: it has mounts that nobody else sees."""
    tie(parent)
    if job.disk_mib or job.shm_mib:
        spaces.private_mounts()
    if job.disk_mib:
        spaces.small_disk(str(disk), job.disk_mib * _MIB)
    if job.shm_mib:
        spaces.small_disk("/dev/shm", job.shm_mib * _MIB)


def tie(parent: int) -> None:
    """For a fresh child: it is asked to end when we do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
