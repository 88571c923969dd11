"""Tracks which process writes a checkpoint, whether that process has ended, and which author may publish."""

import os
import socket
from pathlib import Path

import msgspec

from holdfast.checkpoint.manifest import Author, TakenOverError, WriterProcess
from holdfast.checkpoint.storage_opener import Storage, open_storage
from holdfast.core.decoding import from_json

_FENCE = ".holdfast-author.json"


def take_ownership(url: str, author: Author) -> None:
    """Make this author the only one that may publish here. Call it once per generation, before any write. Raises
    TakenOverError if a later generation of the same run owns the storage."""
    storage = open_storage(url)
    holder = _read_owner(storage)
    if holder and holder.run == author.run and holder.generation > author.generation:
        raise TakenOverError(_describe_refusal(url, holder, author))
    if holder != author:
        storage.make_folder()
        storage.put_file(_FENCE, msgspec.json.encode(author))
        storage.sync_folder()


def check_ownership(storage: Storage, author: Author) -> None:
    """Raise TakenOverError if another author has taken this storage meanwhile."""
    holder = _read_owner(storage)
    if holder and (holder.run != author.run or holder.generation > author.generation):
        raise TakenOverError(_describe_refusal(storage.url(), holder, author))


def _read_owner(storage: Storage) -> Author | None:
    content = storage.read(_FENCE)
    try:
        return from_json(content, Author) if content else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # not ours to read; the next one to take it writes it anew


def _describe_refusal(url: str, holder: Author, author: Author) -> str:
    said = f"has taken over {url}, so generation {author.generation} may not publish there"
    if holder.run == author.run:
        return f"generation {holder.generation} {said}"
    mend = "groups or writers that save at the same time need separate paths"
    return f"generation {holder.generation} of run {holder.run} {said}; {mend}"


def this_process() -> WriterProcess:
    pid = os.getpid()
    return WriterProcess(host=_host_id(), pid=pid, start=_start_ticks(pid) or 0)


def has_ended(process: WriterProcess) -> bool:
    """Return whether the process has certainly ended; False if it runs on another machine, boot or container."""
    return process.host == _host_id() and _start_ticks(process.pid) != process.start


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
