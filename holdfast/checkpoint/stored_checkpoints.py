"""The checkpoints that storage holds: finding them, noting doubts about them, and seeing who else writes there."""

import sys
import time
from collections.abc import Collection, Iterator

import msgspec
from msgspec.structs import replace

from holdfast.checkpoint.checkpoint_publication import SMALL_AT_ONCE
from holdfast.checkpoint.direct_io import run_in_threads
from holdfast.checkpoint.doubt_notes import DOUBTS, DoubtedRun, UnknownDoubtsError, read_doubts, write_doubts
from holdfast.checkpoint.manifest import MANIFEST, Author, decode_manifest, step_of
from holdfast.checkpoint.storage_errors import CorruptError, StorageError
from holdfast.checkpoint.storage_opener import Storage, open_storage
from holdfast.checkpoint.storage_owner import describe_rival, is_rival, read_owner
from holdfast.checkpoint.writable_check import look_in_time
from holdfast.core.snapshots.checkpoint_listing import (
    CheckpointListing,
    ListedCheckpoint,
    fit_number,
    fit_text,
    make_listing,
)
from holdfast.model.state_doubt import Doubt

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


def find_checkpoints(base: str, step: int | None = None) -> tuple[StoredCheckpoint, ...]:
    """Return all published checkpoints, or those of one step, newest first."""
    return find_published(open_storage(base), step)


def describe_published(
    base: str, found: Collection[StoredCheckpoint], generation: int, *, doubted: bool = False
) -> CheckpointListing:
    """Return all checkpoints that were found as a message for the controller; with `doubted`, nobody is to use any."""
    listed = tuple(
        ListedCheckpoint(
            name=fit_text(folder_name(one)),
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


def folder_name(one: StoredCheckpoint) -> str:
    return one.url.rstrip("/").rpartition("/")[2]


def find_rival(url: str, run_id: str) -> str:
    """Return one sentence if another run of this host writes to this storage now; "" if none is known to do so."""

    def look() -> str:
        storage = open_storage(url)
        try:
            holder = read_owner(storage)
            if not holder or not is_rival(storage, holder) or (run_id and holder.run.startswith(f"{run_id}.")):
                return ""
            newest = next((one for one in find_published(storage) if one.author.run == holder.run), None)
        except StorageError:
            return ""
        said = f" (step {newest.step} {max(0.0, time.time() - newest.at):.0f} s ago)" if newest else ""
        return describe_rival(url, holder, said)

    return look_in_time(look, _RIVAL_S)


def apply_doubts(
    found: Collection[StoredCheckpoint], run: str, doubts: Collection[Doubt]
) -> tuple[StoredCheckpoint, ...]:
    """Return the checkpoints, with those of this run that are in doubt marked as not ok. `doubts` must be complete,
    because all other checkpoints of this run count as ok, even if the note of doubts is damaged."""
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
    """Write to the storage which checkpoints of this run are in doubt; return the steps that are newly marked.

    No run restores these checkpoints. Entries of runs without checkpoints are dropped. A damaged note is replaced if
    only this run has checkpoints here. If other runs have some, the damaged note may have held their doubts; then raise
    UnknownDoubtsError and write nothing.
    """
    doubts = tuple(doubt.for_later_runs for doubt in doubts)
    storage = open_storage(base)
    found = find_published(storage)
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


def find_published(storage: Storage, step: int | None = None) -> tuple[StoredCheckpoint, ...]:
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
