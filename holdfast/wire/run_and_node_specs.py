"""Files in a run directory from which the processes of a job learn where the others are and what to run."""

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.config import Settings
from holdfast.decoding import from_json
from holdfast.linux.regular_files import move_aside, open_to_write
from holdfast.model.code_release import Release
from holdfast.model.job_and_seats import HostIdentity, Job

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # where torch.compile keeps what it has compiled
COMPILED_ARCHIVES = "compiled"  # folder of its archives, among those of releases; no other host writes there


class EntryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank runs: a script, a module or a program, and how it is started."""

    argv: tuple[str, ...]  # the script, or the module's name, and its arguments
    module: bool = False
    python: str = ""  # the interpreter; "": argv is executed as it is
    zygote: bool = True
    preload: tuple[str, ...] = ()  # by a zygote, before ranks are forked from it
    later: tuple[str, ...] = ()  # by the next one, which is made beside ranks that train
    cwd: str = "."
    role: str = "default"
    copied: bool = False  # it is run from the copy of a release

    def interpreter_argv(self) -> tuple[str, ...]:
        """Return the interpreter and its flags; `-P` keeps the working directory out of a copied module's imports."""
        if not self.python:
            return ()
        return (self.python, "-u", *(("-P",) if self.copied and self.module else ()), *(("-m",) if self.module else ()))


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """RUN_DIR/run.json: everything a controller needs, the first time and after a crash."""

    job: Job
    entry: EntryPoint
    settings: Settings
    fleet: str
    nproc: int
    log_dir: str
    host: str = "127.0.0.1"  # the controller listens here
    port: int = 0
    release: Release = Release(number=1)  # what the job begins with
    started_at: float = 0.0  # 0: an older version wrote it, and does not say
    resumed_at: float = 0.0  # newest --resume; 0: none
    fleet_flags: tuple[str, ...] = ()  # for the cluster's own command, as the user gave them
    allocation: int = 0  # the job of Slurm that the front is in; 0: none
    journal: str = ""  # the address of the database that has it; "": it is in the run directory
    proven: bool = False  # a journal in a database has proofs from its first entry on; older versions left none
    console_files: tuple[str, ...] = ()  # to which the output of `holdfast run` goes; never part of a release


class ControllerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """RUN_DIR/controller.json: where the controller answers."""

    url: str
    pid: int
    started_at: float


FULL_DISK = "full-disk"  # in the run directory: a note that its disk was full


class FullDiskNote(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's note for the next controller: the one before had ended because this disk was full."""

    path: str
    until: float  # when it had room again, by the machine's clock


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """RUN_DIR/exit.json: the job is over. If a controller is gone and this file is missing, the controller crashed."""

    code: int
    reason: str


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """NODE_DIR/spec.json: everything a node needs."""

    node: str
    order: int
    nproc: int
    url: str  # of the controller: unix:PATH where all nodes are on its host, else https://HOST:PORT,... to try in turn
    run_file: str = ""  # the run's own run.json, if this host sees it: a controller and releases are found by it
    moves: bool = False  # the controller may come up elsewhere: its journal is in a database
    keys: str = ""  # a folder with what proves this node to others; "": all are on this host
    log_dir: str
    entry: EntryPoint
    settings: Settings
    run_id: str
    on_host: HostIdentity = HostIdentity()
    host_nodes: int = 1  # nodes of this run that share the host, and so its memory
    learned: str = ""  # a file that they share: modules that the script imports up to its first step
    releases: str = ""  # a folder that they share: staged trees of the user's code
    compiled: str = ""  # a folder for what ranks compile; "": torch chooses one, as all nodes are on this host
    compiled_archives: str = ""  # the controller's folder for archives of it; "": that is on another host
    first_release: str = ""  # the digest of the release that the job began with; "": this host does not know it
    stdin: str = ""  # the note of the process whose standard input rank 0 reads; "": that is on another host


T = TypeVar("T")


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Write a file that only its owner can read: settings hold addresses, and an address may be a secret."""
    publish_file(path, msgspec.json.format(msgspec.json.encode(value)), mode=0o600)


def publish_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file whole or not at all; the umask applies to `mode`. A folder in its place, or whatever else is in that
    of the unfinished file, is moved aside."""
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(open_to_write(str(whole), os.O_TRUNC, mode)[0], "wb") as file:
        file.write(content)
    try:
        whole.replace(path)
    except IsADirectoryError:
        move_aside(str(path))
        whole.replace(path)


def read_json(path: Path, kind: type[T]) -> T:
    return from_json(path.read_bytes(), kind)
