"""Run directories: which is the newest, whose it is, which run it holds, and who controls that run."""

import getpass
import os
import socket
import urllib.parse
from pathlib import Path

import msgspec

from holdfast.cli.run_dirs.local_run_list import holdfast_home as holdfast_home
from holdfast.cli.run_dirs.run_dir_trust import foreign_reason, make_private_folder
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.decoding import from_json
from holdfast.wire import controller_request, folder_use_lock, run_and_node_specs
from holdfast.wire.rank_environment_defaults import make_rank_environment
from holdfast.wire.run_and_node_specs import ControllerAddress, NodeSpec, RunEnd, RunSpec

NO_RUN = "there is no run yet"
COMPILED_CODE = "torchinductor_cache"  # in files of such names no rank finds what it resumes from
STDIN = "stdin"  # the note of the front, whose standard input rank 0 reads
CONTROLLER = "holdfast.cli.launch.controller_main"  # the module, and the word that its command line has
ROOM_BYTES = 1 << 20  # a disk with less than this is full


def controller_lock(run: RunSpec, run_dir: Path) -> Path:
    """Return the file that the controller of this host locks. Hosts that share a run directory have one each: which of
    them acts a lease decides, and a lock may outlast a host that stands still."""
    shared = run.fleet in ("slurm", "kubernetes")
    return run_dir / (f"controller-{socket.gethostname()}.lock" if shared else "controller.lock")


def node_environment(run_dir: Path) -> dict[str, str]:
    """Return the environment of this host's nodes. Their fork server must have the same environment."""
    try:
        env = from_json((run_dir / "env.json").read_bytes(), dict[str, str])
    except (OSError, msgspec.DecodeError) as e:
        raise UsageError(f"{run_dir}/env.json cannot be read: {e}; without it no node can start here") from None
    return make_rank_environment(env)


def lock_run_dir(run_dir: Path) -> tuple[int, ...]:
    """Mark the run as alive as long as this process, or a child that inherits the returned file descriptors, lives."""
    try:
        return folder_use_lock.lock_shared(run_dir)
    except BlockingIOError:
        raise UsageError(f"{run_dir} is being cleaned by holdfast clean; try again when it is done") from None
    except OSError as e:
        raise UsageError(f"cannot write to the run directory {run_dir}: {e.strerror}; give another --run-dir") from None


def mark_newest(run_dir: Path) -> None:
    """Mark this run as the newest, which commands use by default; ignored if holdfast's home folder is not writable."""
    try:
        make_private_folder(holdfast_home())
        link = holdfast_home() / f".newest.{os.getpid()}"
        link.symlink_to(run_dir)
        link.replace(holdfast_home() / "newest")
    except OSError:
        pass


def free_bytes(run_dir: Path) -> int:
    """Return how many bytes can still be written to the disk that holds a run."""
    disk = os.statvfs(run_dir)
    return disk.f_bavail * disk.f_frsize if disk.f_favail or not disk.f_files else 0


def is_disk_full(run_dir: Path) -> bool:
    return free_bytes(run_dir) < ROOM_BYTES


def require_home() -> None:
    """Raise UsageError if something else is where the folder of this user's runs belongs."""
    home = holdfast_home()
    if home.exists() and not home.is_dir():
        raise UsageError(f"{home} is no folder, so no runs can be there; set HOLDFAST_HOME to a folder, or unset it")


def find_newest() -> Path:
    """Return the directory of the newest run. Raise UsageError if there is none."""
    require_home()
    newest = holdfast_home() / "newest"
    if not newest.exists():
        raise UsageError(f"{NO_RUN}; start one with holdfast run, or name a run directory")
    return require_own(newest).resolve()


def holds_run(folder: Path) -> bool:
    try:
        return (folder / "run.json").exists()
    except PermissionError:
        return True  # whatever it holds, the answer is whose it is


def require_own(run_dir: Path) -> Path:
    """Return this run directory if it is this user's and nobody else can write to it, else raise UsageError.
    Call this before reading any file in it, also as root: its files name other files, hosts and programs to use."""
    if why := foreign_reason(run_dir):
        raise UsageError(why)
    return run_dir


def read_spec(run_dir: Path) -> RunSpec:
    try:
        return run_and_node_specs.read_json(run_dir / "run.json", RunSpec)
    except (OSError, msgspec.DecodeError) as e:
        raise UsageError(f"{run_dir}/run.json cannot be read: {e}; is this a run directory of this version?") from None


def outlives_nodes(run: RunSpec) -> bool:
    """Return whether a run's supervisor stays when the cluster takes all nodes away, in order to ask for others."""
    return run.fleet == "slurm" and not run.allocation


def goes_on(run_dir: Path) -> bool:
    """Return whether a run has ended only because its nodes ran out of time, so that other nodes may continue it."""
    try:
        return run_and_node_specs.read_json(run_dir / "exit.json", RunEnd).code == OUT_OF_TIME
    except (OSError, msgspec.DecodeError):
        return False


def block_list_path(wanted: str) -> Path:
    """Return the path of the block list. If `wanted` is empty, it is the list that all runs of this user share."""
    return Path(wanted) if wanted else holdfast_home() / "blocked.json"


def find_controller(run_dir: Path) -> ControllerAddress | None:
    """Return the address of the run's controller, or None if no controller is alive."""
    try:
        found = run_and_node_specs.read_json(run_dir / "controller.json", ControllerAddress)
        argv = Path(f"/proc/{found.pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        here = CONTROLLER in argv and any(os.path.isdir(a) and os.path.samefile(a, run_dir) for a in argv)
    except (OSError, msgspec.DecodeError):
        return None
    return found if here else None  # or the pid belongs to somebody else by now


def user_name() -> str:
    """Return the name of the user who runs this command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as in a container, where a number is all there is
        return f"user {os.getuid()}"


def web_address(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def door_path(run_dir: Path) -> Path:
    """Return the path of the controller's unix socket."""
    return run_dir / controller_request.NAME


def make_node_spec(run: RunSpec, run_dir: Path) -> NodeSpec:
    from holdfast.wire.releases.release_signature import signed_digest

    shares = run.fleet == "join" and run.settings.release.compiled_mb > 0
    return NodeSpec(
        node="",
        order=0,
        nproc=run.nproc,
        url=f"unix:{urllib.parse.quote(str(door_path(run_dir)))}",
        log_dir=run.log_dir,
        entry=run.entry,
        settings=run.settings,
        run_id=run.job.run_id,
        host_nodes=run.job.max_nodes if run.fleet == "local" else 1,
        learned=str(run_dir / "imports.json"),
        releases=str(run_dir / "releases"),
        compiled=str(run_dir / COMPILED_CODE) if shares else "",
        first_release=signed_digest(run.release) if run.release.digest else "",
        stdin=str(run_dir / STDIN) if run.fleet == "local" else "",
    )
