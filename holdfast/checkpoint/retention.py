"""Removes surplus checkpoints and writes that were never finished."""

from collections.abc import Collection

import msgspec

from holdfast.checkpoint.manifest import Author, WriteAttempt, decode_part, is_part_name
from holdfast.checkpoint.storage_errors import CorruptError
from holdfast.checkpoint.storage_opener import Storage, open_storage
from holdfast.checkpoint.storage_owner import has_ended, read_owner
from holdfast.checkpoint.stored_checkpoints import StoredCheckpoint, find_published, folder_name


class UnfinishedWrite(msgspec.Struct, frozen=True):
    """The files of a write that never finished."""

    url: str
    bytes: int


def retain_checkpoints(base: str, keep: int, every: int = 0, *, newest: int | None = None) -> tuple[str, ...]:
    """Remove checkpoints older than the last `keep` good ones, except every `every`-th step; return the removed URLs.

    keep=0 removes none. `newest` is the step published last. If training went back to an earlier step, checkpoints of
    later steps may still exist; they are neither counted nor removed until training has passed their steps. Checkpoints
    in doubt do not count as good, so older checkpoints stay to replace them.
    """
    if keep <= 0:
        return ()
    storage = open_storage(base)
    found, owner = find_published(storage), read_owner(storage) if newest is not None else None
    if owner and owner.since:  # another run that has written since is of another line, and its states are not ours
        found = tuple(one for one in found if one.author.run == owner.run or one.at < owner.since)
    removed = find_surplus(found, keep, every, newest=newest)
    for one in reversed(removed):  # the oldest first, so that the best are left if this is cut short
        storage.remove_folder(folder_name(one))
    return tuple(one.url for one in removed)


def find_surplus(
    found: Collection[StoredCheckpoint],
    keep: int,
    every: int = 0,
    *,
    newest: int | None = None,
) -> tuple[StoredCheckpoint, ...]:
    """Return what `retain_checkpoints` would remove. `found` and the result are ordered newest first."""
    line = [one for one in found if newest is None or one.step <= newest]
    good: list[int] = []  # distinct steps, newest first
    removed: list[StoredCheckpoint] = []
    for one in line:
        if one.ok and one.step in good:
            removed.append(one)  # an earlier write of the same step
        elif len(good) >= keep and not (one.ok and every and one.step % every == 0):
            removed.append(one)
        elif one.ok:
            good.append(one.step)
    return tuple(removed)


def clean_unpublished(
    base: str,
    author: Author | None,
    *,
    before: int = -1,
    force: bool = False,
    found: Collection[StoredCheckpoint] | None = None,
) -> tuple[str, ...]:
    """Remove unpublished writes that will certainly never be published; return their URLs. With `force`, remove all.

    A write of the author's own run cannot succeed if it is of an earlier generation, or of an earlier step than the
    newest that the author has published or is beginning to write (`before`). A write of another run cannot succeed if
    the processes that wrote it have ended. `found` is what is published, if the caller has just looked.
    """
    storage = open_storage(base)
    published = find_published(storage) if found is None else found
    last = max((before, *(one.step for one in published if one.author == author)))
    attempts = storage.list_unpublished()
    dead = [one.name for one in attempts if force or _is_dead(storage, one, author, last)]
    for name in dead:
        storage.remove_folder(name)
    return tuple(storage.url(name) for name in dead)


def find_abandoned(base: str, run: str) -> tuple[UnfinishedWrite, ...]:
    """Return the unpublished writes of a run whose writer processes have certainly ended; removes nothing."""
    storage = open_storage(base)
    mine = Author(0, run).tag.rpartition("-")[0]
    attempts = [one for one in storage.list_unpublished() if one.tag.rpartition("-")[0] == mine]
    dead = [one.name for one in attempts if _is_dead(storage, one, None, -1)]
    return tuple(UnfinishedWrite(url=storage.url(name), bytes=_folder_bytes(storage, name)) for name in dead)


def _folder_bytes(storage: Storage, folder: str) -> int:
    return sum(storage.file_size(f"{folder}/{name}") or 0 for name in storage.list_names(folder))


def _is_dead(storage: Storage, attempt: WriteAttempt, author: Author | None, last: int) -> bool:
    if not attempt.tag:
        return True  # taken back already
    run, _, generation = attempt.tag.rpartition("-")
    if author and generation.isdecimal() and run == author.tag.rpartition("-")[0]:
        # Within a generation steps only grow, and a step is published after every rank has written its part of it.
        return (int(generation), attempt.step) < (author.generation, last)
    try:
        contents = [
            storage.read(f"{attempt.name}/{name}") for name in storage.list_names(attempt.name) if is_part_name(name)
        ]
        writers = [decode_part(content).writer for content in contents if content]
    except CorruptError:
        return False
    return bool(writers) and all(map(has_ended, writers))
