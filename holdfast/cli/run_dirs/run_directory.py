"""Run directories: making one, its files and secrets, and finding the newest."""

import contextlib
import getpass
import json
import os
import re
import secrets
import socket
import time
import urllib.parse
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.cli.run_dirs.local_run_list import holdfast_home as holdfast_home
from holdfast.cli.run_dirs.private_run_dirs import (
    find_foreign_link,
    foreign_reason,
    make_private_folder,
    remove_below,
)
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.rank_console import say
from holdfast.core.decide.fleet_news import OUT_OF_TIME
from holdfast.core.decoding import from_json
from holdfast.core.terminal_sanitizer import is_text, plain_line
from holdfast.linux import process_attributes
from holdfast.linux.network_file_systems import network_kind
from holdfast.wire import controller_request, folder_use_lock, run_and_node_specs
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.rank_environment_defaults import make_rank_environment
from holdfast.wire.run_and_node_specs import COMPILED_ARCHIVES, ControllerAddress, NodeSpec, RunEnd, RunSpec

if TYPE_CHECKING:
    from holdfast.wire.credentials.certificate_authority import CertificateAuthority

_OLD_S = 60.0  # of a process that only now starts a job
NO_RUN = "there is no run yet"
COMPILED_CODE = "torchinductor_cache"  # in files of such names no rank finds what it resumes from
SECRET_FILES = ("token", "env.json")  # these and the folders below are needed to resume, and by nobody afterwards
_RESUME_FOLDERS = ("door", "keys", "slurm/*/keys", f"{COMPILED_CODE}*", f"releases/{COMPILED_ARCHIVES}")
STDIN = "stdin"  # the note of the front, whose standard input rank 0 reads
CONTROLLER = "holdfast.cli.launch.controller_main"  # the module, and the word that its command line has


def make_run_dir(wanted: str | None, run_id: str) -> Path:
    """Make a new run directory that only its owner can read. Raise UsageError if that fails."""
    run_dir = Path(wanted).absolute() if wanted else _unused_path(holdfast_home() / "runs", run_id)
    try:
        if link := find_foreign_link(run_dir):
            raise UsageError(f"{link}; give another --run-dir")
        make_private_folder(run_dir)
        if run_dir.is_symlink():
            raise UsageError(f"{run_dir} is a symbolic link; give another --run-dir")
        if why := foreign_reason(run_dir):
            raise UsageError(f"{why}; give another --run-dir")
        if (run_dir / "run.json").exists():
            if (run_dir / "exit.json").exists() and not goes_on(run_dir):
                raise UsageError(f"{run_dir} holds a run that has ended; give another --run-dir")
            raise UsageError(f"{run_dir} holds a run already; give --resume {run_dir}, or another --run-dir")
        if any(run_dir.iterdir()):
            raise UsageError(f"{run_dir} is not empty; give an empty or a new --run-dir")
        run_dir.chmod(0o700)
    except OSError as e:
        raise UsageError(f"cannot make the run directory {run_dir}: {e.strerror}; give another --run-dir") from None
    return run_dir


def require_local_disk(run_dir: Path) -> None:
    """Raise UsageError if this folder is on a network file system, where a journal is not safe."""
    if kind := network_kind(run_dir):
        raise UsageError(
            f"{run_dir} is on {kind}, a network file system, where SQLite's write-ahead log is not safe; give a "
            "--run-dir on a disk of this host, or keep the journal in a database with --journal"
        )


def is_shared(run: RunSpec, run_dir: Path) -> bool:
    """Return whether several hosts see the run directory, so that its journal must not need shared memory."""
    return run.fleet == "slurm" or bool(network_kind(run_dir))


def shared_journal_text(run: RunSpec, run_dir: Path) -> str:
    """Return what differs with a journal on a network file system; "" on a local disk."""
    if run.journal or not (kind := network_kind(run_dir)):
        return ""
    return f"the journal is on {kind}, a network file system, so it has a rollback journal and no write-ahead log"


def controller_lock(run: RunSpec, run_dir: Path) -> Path:
    """Return the file that the controller of this host locks. Hosts that share a run directory have one each: which of
    them acts a lease decides, and a lock may outlast a host that stands still."""
    shared = run.fleet in ("slurm", "kubernetes")
    return run_dir / (f"controller-{socket.gethostname()}.lock" if shared else "controller.lock")


def make_log_dir(wanted: str | None, run_dir: Path, run_id: str) -> Path:
    log_dir = _unused_path(Path(wanted).absolute(), run_id) if wanted else run_dir / "logs"
    try:
        log_dir.parent.mkdir(parents=True, exist_ok=True)
        while not _try_to_make(log_dir):  # somebody else was faster
            log_dir = log_dir.with_name(f"{log_dir.name}-{secrets.token_hex(4)}")
        probe = log_dir / f".{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as e:
        if run_dir.parent == holdfast_home() / "runs":  # nothing was started; a folder that a person named stays
            with contextlib.suppress(OSError):
                run_dir.rmdir()
        raise UsageError(f"cannot write to the log directory {log_dir}: {e.strerror}; give another --log-dir") from None
    return log_dir


def _try_to_make(folder: Path) -> bool:
    """Make a folder. Return False if it exists already."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _unused_path(folder: Path, run_id: str) -> Path:
    """Return an unused path for this run, since a user may give the same id to every run."""
    place = folder / re.sub(r"[^\w.-]", "_", run_id)
    return place if not place.exists() else place.with_name(f"{place.name}-{new_run_id()}")


def new_run_id() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def save_environment(run_dir: Path) -> None:
    """Save this process's environment for nodes that start later, even after a resume from another shell. Leave out
    variables whose bytes are not valid text: the messages that bring an environment to ranks hold text."""
    env = {name: value for name, value in os.environ.items() if is_text(name) and is_text(value)}
    if left := sorted(map(plain_line, os.environ.keys() - env.keys())):
        say(f"ranks do not get these environment variables, whose values are no UTF-8: {', '.join(left)}")
    try:
        mutual_tls.write_secret(run_dir / "env.json", json.dumps(env).encode())
    except OSError as e:
        raise UsageError(f"cannot write to the run directory {run_dir}: {e.strerror}; give another --run-dir") from None


def node_environment(run_dir: Path) -> dict[str, str]:
    """Return the environment of this host's nodes. Their fork server must have the same environment."""
    try:
        env = from_json((run_dir / "env.json").read_bytes(), dict[str, str])
    except (OSError, msgspec.DecodeError) as e:
        raise UsageError(f"{run_dir}/env.json cannot be read: {e}; without it no node can start here") from None
    return make_rank_environment(env)


def publish_run(run_dir: Path, run: RunSpec) -> None:
    """Write the files that tell the controller and holdfast's commands what the run is: token, environment, spec."""
    try:
        mutual_tls.write_secret(run_dir / "token", os.urandom(16).hex().encode())
        save_environment(run_dir)
        age_s = process_attributes.own_age_s()
        started_at = time.time() - (age_s if age_s < _OLD_S else 0.0)  # an older process did something else before
        run_and_node_specs.write_json(run_dir / "run.json", msgspec.structs.replace(run, started_at=started_at))
    except OSError as e:
        raise UsageError(f"cannot write to the run directory {run_dir}: {e.strerror}; give another --run-dir") from None


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


def open_authority(run_dir: Path) -> "CertificateAuthority":
    """Return the certificate authority that decides which hosts belong to this run; the first call creates it."""
    from holdfast.wire.credentials.certificate_authority import CertificateAuthority

    return CertificateAuthority(door_keys_folder(run_dir))


def door_keys_folder(run_dir: Path) -> Path:
    """Return the folder of the keys with which the controller proves its identity and checks hosts."""
    return run_dir / "door"


def is_certified(run_dir: Path) -> bool:
    """Return whether nodes prove who they are with certificates of the user's own authority, not with a secret."""
    return not (door_keys_folder(run_dir) / mutual_tls.SIGNING).exists()


def read_door_secret(run_dir: Path) -> str:
    """Return the secret that joining hosts must know."""
    return (door_keys_folder(run_dir) / "secret").read_text(encoding="utf-8").strip()


def write_door_secret(run_dir: Path, told: str) -> None:
    door_keys_folder(run_dir).mkdir(mode=0o700, exist_ok=True)
    mutual_tls.write_secret(door_keys_folder(run_dir) / "secret", told.encode())


def outlives_nodes(run: RunSpec) -> bool:
    """Return whether a run's supervisor stays when the cluster takes all nodes away, in order to ask for others."""
    return run.fleet == "slurm" and not run.allocation


def goes_on(run_dir: Path) -> bool:
    """Return whether a run has ended only because its nodes ran out of time, so that other nodes may continue it."""
    try:
        return run_and_node_specs.read_json(run_dir / "exit.json", RunEnd).code == OUT_OF_TIME
    except (OSError, msgspec.DecodeError):
        return False


def forget_secrets(run_dir: Path) -> None:
    """Remove the secrets and the compiled code of an ended run, which only a resume would need."""
    for name in SECRET_FILES:
        (run_dir / name).unlink(missing_ok=True)
    for path in find_resume_folders(run_dir):
        with contextlib.suppress(OSError):
            remove_below(run_dir, path)


def find_resume_folders(run_dir: Path) -> list[Path]:
    """Return the folders that hold a run's secrets and compiled code, including half-copied ones."""
    return [path for pattern in _RESUME_FOLDERS for path in sorted(run_dir.glob(pattern))]


def people_path() -> Path:
    """Return the file of user tokens; they are valid for the ports of all runs of this user."""
    return holdfast_home() / "people.json"


def block_list_path(wanted: str) -> Path:
    """Return the path of the block list. If `wanted` is empty, it is the list that all runs of this user share."""
    return Path(wanted) if wanted else holdfast_home() / "blocked.json"


def read_token(run_dir: Path) -> str:
    """Return the run's own token for its port; makes a new one if it is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        return (run_dir / "token").read_text(encoding="ascii").strip()
    made = os.urandom(16).hex()
    mutual_tls.write_secret(run_dir / "token", made.encode())
    return made


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
        stdin=str(run_dir / STDIN) if run.fleet == "local" else "",
    )
