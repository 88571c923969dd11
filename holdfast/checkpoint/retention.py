"""Finds checkpoints on storage, and removes surplus ones and unfinished writes."""

import sys
import time
from collections.abc import Collection, Iterator

import msgspec
from msgspec.structs import replace

from holdfast.checkpoint.checkpoint_save import SMALL_AT_ONCE
from holdfast.checkpoint.direct_io import run_in_threads
from holdfast.checkpoint.doubt_notes import DOUBTS, DoubtedRun, UnknownDoubtsError, read_doubts, write_doubts
from holdfast.checkpoint.manifest import (
    MANIFEST,
    Author,
    CorruptError,
    StorageError,
    WriteAttempt,
    decode_manifest,
    decode_part,
    is_part_name,
    step_of,
)
from holdfast.checkpoint.storage_opener import Storage, open_storage
from holdfast.checkpoint.storage_owner import describe_rival, has_ended, is_rival, read_owner
from holdfast.checkpoint.writable_check import look_in_time
from holdfast.core.snapshots.checkpoint_listing import (
    CheckpointListing,
    ListedCheckpoint,
    fit_number,
    fit_text,
    make_listing,
)
from holdfast.model.state_copy import Doubt

_RIVAL_S = 5.0  # for a look at who writes; storage that hangs is another trouble


class StoredCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A published checkpoint. `ok` means that its manifest is intact; verify_checkpoint checks the other files."""

    step: int
    url: str
    ok: bool
    why: str = ""  # not ok
    doubted: bool = False  # not ok, though its files may be: the loss went wrong after it
    unvouched: bool = False  # doubted only because the note about doubts cannot be read
    at: float = 0.0
    author: Author = Author(0)
    world: int = 0
    layout: str = ""
    bytes: int = 0


class UnfinishedWrite(msgspec.Struct, frozen=True):
    """The files of a write that never finished."""

    url: str
    bytes: int


def find_checkpoints(base: str, step: int | None = None) -> tuple[StoredCheckpoint, ...]:
    """Return all published checkpoints, or those of one step, newest first."""
    return _find_published(open_storage(base), step)


def describe_published(
    base: str, found: Collection[StoredCheckpoint], generation: int, *, doubted: bool = False
) -> CheckpointListing:
    """Return all checkpoints that were found as a message for the controller; with `doubted`, nobody is to use any."""
    listed = tuple(
        ListedCheckpoint(
            name=fit_text(_folder_name(one)),
            step=fit_number(one.step),
            at=one.at,
            generation=fit_number(one.author.generation),
            run=fit_text(one.author.run),
            world=fit_number(one.world),
            bytes=fit_number(one.bytes),
            doubted=one.doubted or doubted,
            why=fit_text(one.why),
        )
        for one in found
    )
    return make_listing(generation, open_storage(base).url(), listed)


def _folder_name(one: StoredCheckpoint) -> str:
    return one.url.rstrip("/").rpartition("/")[2]


def find_rival(url: str, run_id: str) -> str:
    """Return one sentence if another run of this host writes to this storage now; empty if not, or if not known."""

    def look() -> str:
        storage = open_storage(url)
        try:
            holder = read_owner(storage)
            if not holder or not is_rival(storage, holder) or (run_id and holder.run.startswith(f"{run_id}.")):
                return ""
            newest = next((one for one in _find_published(storage) if one.author.run == holder.run), None)
        except StorageError:
            return ""
        said = f" (step {newest.step} {max(0.0, time.time() - newest.at):.0f} s ago)" if newest else ""
        return describe_rival(url, holder, said)

    return look_in_time(look, _RIVAL_S)


def apply_doubts(
    found: Collection[StoredCheckpoint], run: str, doubts: Collection[Doubt]
) -> tuple[StoredCheckpoint, ...]:
    """Return these checkpoints, those of this run that are in doubt marked as not ok.
    `doubts` must be complete: the run's other checkpoints become ok even if the note of doubts is damaged."""
    told = []
    for one in found:
        if one.unvouched and run and one.author.run == run:
            one = replace(one, ok=True, why="", doubted=False, unvouched=False)
        made = one.author.generation if one.ok and one.author.run == run else sys.maxsize
        doubt = next((d for d in doubts if d.bans_state(made, one.step)), None)
        of = f"states after step {doubt.not_after}" if doubt and doubt.not_after >= 0 else "all states"
        why = f"{of} of generation {doubt.generation} are in doubt" if doubt else ""
        told.append(replace(one, ok=False, why=why, doubted=True) if doubt else one)
    return tuple(told)


def mark_doubts(base: str, run: str, doubts: Collection[Doubt]) -> tuple[int, ...]:
    """Note at the storage which checkpoints of this run are in doubt; return the steps newly marked.

    No run restores those. Entries of runs without checkpoints are dropped. A damaged note is replaced; but if other
    runs have checkpoints here, nothing is written and UnknownDoubtsError is raised, because their doubts were in it.
    """
    storage = open_storage(base)
    found = _find_published(storage)
    there = {one.author.run for one in found} - {run}
    try:
        known, lost = read_doubts(storage), False
    except UnknownDoubtsError:
        if there:
            raise
        known, lost = (), True
    mine = apply_doubts(found, run, ())
    told = apply_doubts(mine, run, doubts)
    new = sorted({after.step for before, after in zip(mine, told, strict=True) if before.ok and not after.ok})
    if new or lost:
        before = next((one.doubts for one in known if one.run == run), ())
        ours = DoubtedRun(run=run, doubts=tuple(dict.fromkeys((*before, *doubts))))
        write_doubts(storage, (*(one for one in known if one.run in there), ours))
    return tuple(new)


def _find_published(storage: Storage, step: int | None = None) -> tuple[StoredCheckpoint, ...]:
    there = storage.list_names()
    names = [name for name in there if (of := step_of(name)) is not None and step in (None, of)]
    found: list[StoredCheckpoint] = []

    def work(turns: Iterator[int]) -> None:
        for index in turns:
            if one := _read_checkpoint(storage, names[index]):
                found.append(one)

    run_in_threads(len(names), SMALL_AT_ONCE, work)
    try:
        for known in read_doubts(storage) if DOUBTS in there else ():
            found = [*apply_doubts(found, known.run, known.doubts)]
    except UnknownDoubtsError as e:
        found = [replace(one, ok=False, why=str(e), doubted=True, unvouched=True) if one.ok else one for one in found]
    return tuple(sorted(found, key=lambda one: (one.step, one.at, one.url), reverse=True))


def _read_checkpoint(storage: Storage, name: str) -> StoredCheckpoint | None:
    """Read one checkpoint's manifest; None if the checkpoint was never published."""
    step, url = step_of(name) or 0, storage.url(name)
    try:
        content = storage.read(f"{name}/{MANIFEST}")
        manifest = decode_manifest(content) if content is not None else None
    except CorruptError as e:
        return StoredCheckpoint(step=step, url=url, ok=False, why=f"{MANIFEST} {e}")
    except StorageError as e:
        return StoredCheckpoint(step=step, url=url, ok=False, why=str(e))
    if manifest is None:
        return None
    if manifest.step != step:
        return StoredCheckpoint(step=step, url=url, ok=False, why=f"{MANIFEST} is of step {manifest.step}")
    return StoredCheckpoint(
        step=step,
        url=url,
        ok=True,
        at=manifest.at,
        author=manifest.author,
        world=manifest.world,
        layout=manifest.layout,
        bytes=manifest.bytes,
    )


def retain_checkpoints(base: str, keep: int, every: int = 0, *, newest: int | None = None) -> tuple[str, ...]:
    """Remove checkpoints older than the last `keep` good ones, except every `every`-th step; return the removed URLs.

    keep=0 removes none. `newest` is the step published last: after training went back, later steps belong to an
    abandoned lineage, and are neither counted nor removed before training has passed them. Doubted ones do not count
    as good, so that the checkpoints that may have to replace them stay.
    """
    if keep <= 0:
        return ()
    storage = open_storage(base)
    found, owner = _find_published(storage), read_owner(storage) if newest is not None else None
    if owner and owner.since:  # another run that has written since is of another line, and its states are not ours
        found = tuple(one for one in found if one.author.run == owner.run or one.at < owner.since)
    removed = find_surplus(found, keep, every, newest=newest)
    for one in reversed(removed):  # the oldest first, so that the best are left if this is cut short
        storage.remove_folder(_folder_name(one))
    return tuple(one.url for one in removed)


def find_surplus(
    found: Collection[StoredCheckpoint],
    keep: int,
    every: int = 0,
    *,
    newest: int | None = None,
) -> tuple[StoredCheckpoint, ...]:
    """Return the checkpoints that retention removes; `found` is ordered newest first, and so is the result."""
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
    """Remove unpublished writes that certainly will never be published; return their URLs. These are writes of
    processes that have ended and, in the author's own run, writes of earlier generations and of steps before the newest
    one that the author has published or now begins (`before`). With `force`, remove all. `found` is what is published,
    if the caller has just looked."""
    storage = open_storage(base)
    published = _find_published(storage) if found is None else found
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
