"""Run as a program: writes a checkpoint again and again, and dies at every operation of the file system on the way.

Prints one line of JSON per death: where it was, and what somebody who comes later finds. Not a test itself: processes
are forked here, which wants a process without threads.
"""

import contextlib
import itertools
import json
import mmap
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.checkpoint import direct_io
from holdfast.checkpoint.checkpoint_publication import publish_checkpoint, staging_folder, write_part
from holdfast.checkpoint.checkpoint_reader import verify_checkpoint
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.retention import clean_unpublished, retain_checkpoints
from holdfast.checkpoint.storage_owner import take_ownership
from holdfast.checkpoint.stored_checkpoints import find_checkpoints

CALLS = ("open", "close", "write", "pwrite", "fsync", "ftruncate", "rename", "mkdir", "unlink", "rmdir")
PART = bytes(range(256)) * 256 + b"and a little more"
BEFORE, DURING, AFTER = "before", "during", "after"


def save(base: str, step: int, generation: int) -> None:
    """What a keeper does every so many steps."""
    author = Author(generation)
    take_ownership(base, author)
    clean_unpublished(base, author)
    memory = mmap.mmap(-1, len(PART))
    memory[:] = PART[:-1] + bytes([step])
    folder = staging_folder(base, step, author)
    # The second one begins off a page, so that it takes the other way to the disk.
    parts = [write_part(folder, rank, [memoryview(memory)[rank:]], threads=2) for rank in range(2)]
    publish_checkpoint(base, step, parts, b"metadata of torch", author=author)
    retain_checkpoints(base, keep=1, newest=step)


def arm(at: int, when: str) -> None:
    """Let this process die at the operation of this number."""
    numbers = itertools.count()
    write = os.write

    def armed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            if (number := next(numbers)) != at:
                return call(*args, **named)
            with contextlib.suppress(OSError):  # an answer that does not matter any more
                if when == DURING:
                    fd, content, *rest = args
                    call(fd, content[: len(content) // 8192 * 4096 or len(content) // 2], *rest)
                elif when == AFTER:
                    call(*args, **named)
            write(2, f"{number} {name}".encode())
            return os.kill(os.getpid(), signal.SIGKILL)

        return counted

    for name in CALLS:
        setattr(os, name, armed(name, getattr(os, name)))
    direct_io.make_room = armed("fallocate", direct_io.make_room)


def die(base: str, step: int, at: int, when: str) -> str:
    """Save in a process that dies at this operation; which one that was, or "" when it came to its end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writer, 2)
        arm(at, when)
        save(base, step, 2)
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    if status and os.WTERMSIG(status) != signal.SIGKILL:
        raise RuntimeError(said)
    return said if status else ""


def left(base: str) -> dict[str, Any]:
    """What somebody finds who comes later, before and after saving again."""
    found = find_checkpoints(base)
    broken = [why for one in found for why in (one.why, *verify_checkpoint(one.url)) if why]
    save(base, 3, 3)
    names = sorted(path.name for path in Path(base).iterdir())
    return {
        "steps": [one.step for one in found],
        "broken": broken,
        "then": names,
        "good": not verify_checkpoint(find_checkpoints(base)[0].url),
    }


def try_one(folder: str, step: int, at: int, when: str) -> str:
    base = Path(folder, f"{when}{at}")
    shutil.copytree(Path(folder, "template"), base)
    if where := die(str(base), step, at, when):
        print(json.dumps({"when": when, "where": where, **left(str(base))}), flush=True)
    shutil.rmtree(base)
    return where


def main(folder: str, step: int, every: int) -> None:
    save(str(Path(folder, "template")), 1, 1)
    for at in itertools.count(step=every):
        if not (where := try_one(folder, step, at, BEFORE)):
            break
        try_one(folder, step, at, AFTER)
        if where.endswith("write"):
            try_one(folder, step, at, DURING)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
