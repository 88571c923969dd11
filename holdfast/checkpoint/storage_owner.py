"""Tracks which process writes a checkpoint, whether that process has ended, and which author may publish."""

import os
import socket
import time
from pathlib import Path

import msgspec

from holdfast.checkpoint.manifest import Author, WriterProcess, content_digest, step_of
from holdfast.checkpoint.storage_errors import TakenOverError
from holdfast.checkpoint.storage_opener import Storage, open_storage
from holdfast.decoding import from_json

_FENCE = ".holdfast-author.json"


class StorageOwner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The author that may publish at a storage."""

    generation: int
    run: str = ""
    writer: WriterProcess | None = None
    since: float = 0.0  # when the process that took it for this run began; 0: an earlier version did not note it
    url: str = ""  # of the storage that it took; by this and the inode a copy of this file is known; "": as above
    inode: int = 0  # of the folder; 0: it has none
    seal: str = ""  # digest of the above; "": an earlier version wrote it


def take_ownership(url: str, author: Author) -> None:
    """Make this author the only one that may publish in this storage. Call it once per generation, before any write.
    Raises TakenOverError if the owner is a later generation of the same run, or another run that is certainly alive."""
    storage = open_storage(url)
    holder = read_owner(storage)
    if holder and holder.run == author.run and holder.generation > author.generation:
        raise TakenOverError(_describe_refusal(url, holder, author))
    if holder and holder.run != author.run and is_rival(storage, holder):
        raise TakenOverError(describe_rival(url, holder))
    same = holder is not None and holder.run == author.run
    writer = this_process()
    since = holder.since if holder and same else _start_time(writer)
    storage.make_folder()
    owner = StorageOwner(
        generation=author.generation,
        run=author.run,
        writer=writer,
        since=since,
        url=storage.url(),
        inode=_read_inode(storage),
    )
    if holder != owner:
        storage.put_file(_FENCE, _encode_owner(owner))
        storage.sync_folder()


def is_rival(storage: Storage, holder: StorageOwner) -> bool:
    """Return whether the owner is another running process of this host that uses this very folder, not a copy of it.
    Folders are compared by URL and inode: device numbers change when a network file system is mounted again."""
    here = holder.url in ("", storage.url()) or holder.inode == _read_inode(storage) != 0
    return here and is_alive_elsewhere(holder.writer)


def _read_inode(storage: Storage) -> int:
    """Return the inode of a storage's folder; 0 if it has none."""
    return (storage.read_identity() or (0, 0))[1]


class OwnedStorages:
    """The storages that this process owns. Each has the author who writes there, and the identity of its folder, by
    which a replaced folder is noticed."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[Author, tuple[int, int] | None]] = {}

    def take(self, url: str, author: Author, step: int, notes: list[str]) -> bool:
        """Become the owner of a storage before this step is written; return False if this author already is. If its
        folder was replaced, own the new one and say so in `notes`. Raises TakenOverError as `take_ownership` does."""
        storage = open_storage(url)
        held, folder = self._taken.get(url, (None, None))
        there, (holder, damaged) = storage.read_identity(), _read_fence(storage)
        ours = (
            held is not None and holder is not None and (holder.run, holder.generation) == (held.run, held.generation)
        )
        replaced = held is not None and (holder is None or (there != folder and not ours))
        if held == author and not replaced:
            self._taken[url] = (author, there)  # a network's file system that is mounted anew has another device number
            return False
        take_ownership(url, author)
        self._taken[url] = (author, storage.read_identity())
        if damaged:
            notes.append(f"{storage.url(_FENCE)} was not as written, before step {step}; it is written again")
        elif replaced:
            notes.append(f"before step {step} was written, {_describe_replaced(storage, folder, there)}")
        return True

    def forget(self, url: str) -> None:
        self._taken.pop(url, None)


def _describe_replaced(storage: Storage, before: tuple[int, int] | None, there: tuple[int, int] | None) -> str:
    """Return a sentence that says how a folder was replaced or, on remote storage, that its owner file is gone."""
    url = storage.url()
    if before and there is None:
        return f"{url} was removed; it is made anew, without the checkpoints that were there"
    if before and there and before != there:
        what = "folder" if there[0] == before[0] else "file system"
        empty = not any(step_of(name) is not None for name in storage.list_names())
        lacks = ", and earlier ones are not there" if empty else ""
        return f"another {what} was put in place of {url}; checkpoints go there now{lacks}"
    return f"{url} lost its file {_FENCE}, which is written again: were checkpoints removed there?"


def release_ownership(url: str, author: Author) -> None:
    """Let other runs of this host take the storage, because this author publishes nothing more."""
    storage = open_storage(url)
    holder = read_owner(storage)
    if holder and (holder.run, holder.generation) == (author.run, author.generation):
        storage.put_file(_FENCE, _encode_owner(msgspec.structs.replace(holder, writer=None)))


def check_ownership(storage: Storage, author: Author) -> None:
    """Raise TakenOverError if another author has taken this storage meanwhile."""
    holder = read_owner(storage)
    if holder and (holder.run != author.run or holder.generation > author.generation):
        raise TakenOverError(_describe_refusal(storage.url(), holder, author))


def describe_rival(url: str, holder: StorageOwner, newest: str = "") -> str:
    """Return one sentence about a run that writes to this storage now, and about its newest checkpoint."""
    assert holder.writer is not None
    run = holder.run.rpartition(".")[0] or holder.run
    where = f"pid {holder.writer.pid} on {holder.writer.host.partition('/')[0]}"
    return f"run {run} ({where}) is writing to {url} now{newest}: give another path"


def read_owner(storage: Storage) -> StorageOwner | None:
    """Return the author that may publish to this storage; None if it has no sound owner file."""
    return _read_fence(storage)[0]


def _read_fence(storage: Storage) -> tuple[StorageOwner | None, bool]:
    """Return the owner from the owner file and whether that file is damaged. If it is missing or damaged, the owner is
    None; the next author that takes the storage writes the file anew."""
    content = storage.read(_FENCE)
    if not content:
        return None, content is not None
    try:
        owner = from_json(content, StorageOwner)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, True
    if owner.seal and _encode_owner(owner) != content:
        return None, True
    return msgspec.structs.replace(owner, seal=""), False


def _encode_owner(owner: StorageOwner) -> bytes:
    bare = msgspec.structs.replace(owner, seal="")
    return msgspec.json.encode(msgspec.structs.replace(bare, seal=content_digest(msgspec.json.encode(bare))))


def _describe_refusal(url: str, holder: StorageOwner, author: Author) -> str:
    said = f"has taken over {url}, so generation {author.generation} may not publish there"
    if holder.run == author.run:
        return f"generation {holder.generation} {said}"
    mend = "groups or writers that save at the same time need separate paths"
    return f"generation {holder.generation} of run {holder.run} {said}; {mend}"


def this_process() -> WriterProcess:
    pid = os.getpid()
    return WriterProcess(host=_host_id(), pid=pid, start=_start_ticks(pid) or 0)


def has_ended(process: WriterProcess) -> bool:
    """Return whether the process has ended; False if it is on another machine, boot or container, so we cannot tell."""
    return process.host == _host_id() and _start_ticks(process.pid) != process.start


def is_alive_elsewhere(process: WriterProcess | None) -> bool:
    """Return whether the writer is a running process of this host other than this one; False if unknown."""
    return process is not None and process.host == _host_id() and process != this_process() and not has_ended(process)


def _start_time(process: WriterProcess) -> float:
    """Return the wall time at which a process of this host was started."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + process.start / os.sysconf("SC_CLK_TCK")


def _host_id() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _start_ticks(pid: int) -> int | None:
    """Return the process's start time in clock ticks since boot; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])
