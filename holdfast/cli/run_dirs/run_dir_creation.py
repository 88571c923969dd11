"""Makes run directories and log directories, and writes the files that tell others what the run is."""

import contextlib
import json
import os
import re
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from holdfast.cli.run_dirs.local_run_list import holdfast_home
from holdfast.cli.run_dirs.run_dir_trust import find_foreign_link, foreign_reason, make_private_folder
from holdfast.cli.run_dirs.run_directory import ROOM_BYTES, goes_on, is_disk_full
from holdfast.cli.run_flags.flag_table import UsageError
from holdfast.cli.terminal.rank_console import say
from holdfast.core.terminal_sanitizer import is_text, plain_line
from holdfast.linux import own_process_settings
from holdfast.linux.network_file_systems import network_kind
from holdfast.wire import run_and_node_specs
from holdfast.wire.credentials import mutual_tls
from holdfast.wire.run_and_node_specs import RunSpec

_OLD_S = 60.0  # of a process that only now starts a job


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
    if full := no_room_text(run_dir):
        _remove_unnamed(run_dir)
        raise UsageError(f"{full}; free some, or give another --run-dir")
    return run_dir


def no_room_text(folder: Path) -> str:
    """Return a clause that the disk of this folder is too full for a run, or ""."""
    if not is_disk_full(folder):
        return ""
    return f"the disk that holds {folder} is full: it has less than {ROOM_BYTES >> 20} MiB free, or no inodes"


def _remove_unnamed(run_dir: Path) -> None:
    """Remove the folder of a run that was not started; one that a person named stays."""
    if run_dir.parent == holdfast_home() / "runs":
        with contextlib.suppress(OSError):
            run_dir.rmdir()


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
        _remove_unnamed(run_dir)
        raise UsageError(f"cannot write to the log directory {log_dir}: {e.strerror}; give another --log-dir") from None
    if wanted and (full := no_room_text(log_dir)):
        log_dir.rmdir()
        _remove_unnamed(run_dir)
        raise UsageError(f"{full}; free some, or give another --log-dir")
    return log_dir


def _try_to_make(folder: Path) -> bool:
    """Make a folder for this user alone, as ranks may print secrets. Return False if it exists already."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


def _unused_path(folder: Path, run_id: str) -> Path:
    """Return an unused path for this run, since a user may give the same id to every run."""
    place = folder / folder_name(run_id)
    return place if not place.exists() else place.with_name(f"{place.name}-{new_run_id()}")


def folder_name(run_id: str) -> str:
    """Return a run's id as the name of its folder."""
    return re.sub(r"[^\w.-]", "_", run_id)


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


def publish_run(run_dir: Path, run: RunSpec) -> None:
    """Write the files that tell the controller and holdfast's commands what the run is: token, environment, spec."""
    try:
        mutual_tls.write_secret(run_dir / "token", os.urandom(16).hex().encode())
        save_environment(run_dir)
        age_s = own_process_settings.own_age_s()
        started_at = time.time() - (age_s if age_s < _OLD_S else 0.0)  # an older process did something else before
        run_and_node_specs.write_json(run_dir / "run.json", msgspec.structs.replace(run, started_at=started_at))
    except OSError as e:
        raise UsageError(f"cannot write to the run directory {run_dir}: {e.strerror}; give another --run-dir") from None
