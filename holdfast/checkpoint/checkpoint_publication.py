"""Writes every rank's part of a checkpoint, then publishes all parts together atomically.

    folder = staging_folder(base, step, author)    the same for all ranks
    part = write_part(folder, rank, ranges)        for every rank, on any node
    url = publish_checkpoint(base, step, parts, metadata, author=author)     once, when all parts are there

Files left by an interrupted write never count as a checkpoint. Storage failures raise StorageError with one sentence;
`WriteLane.run` turns a failure, or storage that hangs, into an outcome.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

import msgspec

from holdfast.checkpoint.direct_io import THREADS, MemoryRanges, run_in_threads, spare_block
from holdfast.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Author,
    CheckpointPart,
    Manifest,
    SealedFile,
    block_count,
    checksum_block,
    decode_part,
    encode_manifest,
    encode_part,
    missing_ranks,
    part_name,
    seal_file,
    staged_of,
    tagged_of,
)
from holdfast.checkpoint.storage_errors import CorruptError, PartFailedError, PartsMissingError, StorageError
from holdfast.checkpoint.storage_opener import Storage, open_storage
from holdfast.checkpoint.storage_owner import check_ownership, this_process
from holdfast.checkpoint.writable_check import try_write
from holdfast.checkpoint.write_lane import WritePulse
from holdfast.core.terminal_sanitizer import cut_words

SMALL_AT_ONCE = 8  # small files are waited for, not worked on
UNKNOWN = -1  # the step that rank 0 writes just now, whichever it is
BEGUN_S = 5.0  # for rank 0 to begin with a step that is due
_LOOK_S = 0.2
_TRY_S = 1.0  # whoever waits for rank 0 as long looks whether storage takes anything at all; then more seldom
_WHY_CHARS = 1000  # of a reason, so that it fits where a part's file was
_NO_ROOM = "there was no room on storage, not even for the reason"
_SLOW_S = 1.0  # storage that takes longer to answer had stopped


def staging_folder(base: str, step: int, author: Author) -> str:
    """Return the folder that this author writes the parts of this step to."""
    storage = open_storage(base)
    return storage.url(storage.staging_name(step, author.tag))


def write_part(
    folder: str, rank: int, ranges: Sequence[memoryview], *, threads: int = THREADS, pulse: WritePulse | None = None
) -> CheckpointPart:
    """Write one rank's part, the concatenated ranges, to stable storage; do nothing if an identical one is there."""
    storage = open_storage(folder)
    pulse = pulse or WritePulse()
    draft = CheckpointPart(rank=rank, bytes=MemoryRanges(ranges).bytes, blocks="", writer=this_process(), done=False)
    if whole := _resume_part(storage, draft, ranges):
        pulse.add_bytes(whole.bytes)
        return whole
    try:
        storage.make_folder()
        storage.put_file(
            draft.name, encode_part(draft)
        )  # so that anybody can tell who writes, and whether it still lives
        blocks = storage.write(draft.file, ranges, threads, pulse)
        part = msgspec.structs.replace(draft, blocks=blocks, done=True)
        storage.put_file(part.name, encode_part(part))
        storage.sync_folder()
    except StorageError as e:
        _withdraw_part(storage, draft, str(e))
        raise
    return part


def _withdraw_part(storage: Storage, draft: CheckpointPart, why: str) -> None:
    """Delete a failed part's file to free space, and record the reason for the rank that waits for this part."""
    with suppress(StorageError):
        storage.remove_file(draft.file)
        storage.put_mark(draft.name, encode_part(msgspec.structs.replace(draft, why=_masked_reason(why))))
        return
    storage.drop_empty_folder()  # nobody could tell whose it is


def _masked_reason(why: str) -> str:
    """Return why a part was not written, as others may read it: an address of storage can hold a password."""
    from holdfast.logs.secret_masking import make_secret_masker  # not before: ranks start without it

    return cut_words(make_secret_masker()(why), _WHY_CHARS)


def forsake_parts(base: str, author: Author, rank: int, steps: Collection[int], *, before: int) -> None:
    """Record for rank 0 that a rank will not write these steps, because its writer was killed or skipped them."""
    storage, known = open_storage(base), set(steps) - {UNKNOWN}
    if UNKNOWN in steps:  # rank 0 waits for one step at a time
        attempts = [one for name in storage.list_names() if (one := staged_of(name) or tagged_of(name))]
        known.update(sorted(one.step for one in attempts if one.tag == author.tag and one.step < before)[-1:])
    for step in known:
        storage = open_storage(staging_folder(base, step, author))
        part = _read_part(storage, rank)
        if _read_part(storage, 0) is not None and (part is None or not (part.done or part.why)):
            draft = CheckpointPart(rank=rank, bytes=0, blocks="", writer=this_process(), done=False)
            _withdraw_part(storage, draft, "the write ended or was passed over first")


def wait_until_begun(folder: str, pulse: WritePulse | None = None, wait_s: float = BEGUN_S) -> bool:
    """Wait until rank 0 begins this step, so that all ranks write the same step. Return False if this takes too long,
    or early if the storage takes no writes: rank 0 then cannot begin, and the caller can unpin the snapshot."""
    storage, until = open_storage(folder), time.monotonic() + wait_s
    try_at, try_s = time.monotonic() + _TRY_S, _TRY_S
    pulse = pulse or WritePulse()
    pulse.waiting, again = True, True
    while True:
        looked_at = time.monotonic()
        if _read_part(storage, 0) is not None:
            pulse.waiting = False
            return True
        now = time.monotonic()
        if again and now > looked_at + _SLOW_S:  # what holds us up holds up rank 0, which goes on with this step too
            until, again, pulse.passed_over = now + wait_s, False, False
        elif now > until or pulse.passed_over or (now > try_at and not _takes_writes(folder)):
            pulse.left_out = True
            return False
        if now > try_at:
            try_s *= 2
            try_at = now + try_s
        pulse.add_bytes()
        time.sleep(_LOOK_S / 2)


def _takes_writes(folder: str) -> bool:
    try:
        try_write(folder.rstrip("/").rpartition("/")[0])
    except StorageError:
        return False
    return True


def collect_parts(
    folder: str, world: int, wait_s: float, pulse: WritePulse | None = None
) -> tuple[CheckpointPart, ...]:
    """Wait until all ranks have written their parts to this folder; return the parts. Ranks need to share only the
    storage. Raises PartsMissingError after `wait_s`, and PartFailedError if a rank reports that it could not write."""
    storage = open_storage(folder)
    until = time.monotonic() + wait_s
    found: dict[int, CheckpointPart] = {}
    while True:
        for rank in missing_ranks(found.values(), world):
            part = _read_part(storage, rank)
            if part and part.why:
                raise PartFailedError(f"rank {rank} could not write its part: {part.why}", rank)
            if part and part.done:
                found[rank] = part
        if not (missing := missing_ranks(found.values(), world)):
            return tuple(found[rank] for rank in range(world))
        if time.monotonic() > until:
            named = ", ".join(map(str, missing[:8])) + (" and more" if len(missing) > 8 else "")
            raise PartsMissingError(f"ranks {named} did not write their parts within {wait_s:g} s", missing)
        if pulse:
            pulse.add_bytes()
        time.sleep(_LOOK_S)


def withdraw_write(folder: str, world: int, why: str) -> None:
    """Give up a checkpoint after a part of it has failed: remove rank 0's part, and the folder once no rank writes
    there. Ranks that wait for the checkpoint learn of this by `has_failed`."""
    storage = open_storage(folder)
    with suppress(StorageError):
        if (first := _read_part(storage, 0)) is not None:
            _withdraw_part(storage, msgspec.structs.replace(first, blocks="", done=False), why)
        parts = [_read_part(storage, rank) for rank in range(world)]
        if all(part is not None and (part.done or part.why) for part in parts):
            base, _, name = folder.rstrip("/").rpartition("/")
            open_storage(base).remove_folder(name)


def has_failed(folder: str) -> bool:
    """Return whether rank 0 has given up this folder, or the folder does not exist. A folder that has become a
    checkpoint does not exist under its old name."""
    first = _read_part(open_storage(folder), 0)
    return first is None or bool(first.why)


def publish_checkpoint(
    base: str,
    step: int,
    parts: Sequence[CheckpointPart],
    metadata: bytes,
    *,
    author: Author,
    layout: str = "",
    torch: str = "",
    pulse: WritePulse | None = None,
) -> str:
    """Turn the written parts into a checkpoint atomically; return its URL."""
    storage = open_storage(base)
    pulse = pulse or WritePulse()
    folder = storage.staging_name(step, author.tag)
    if missing := missing_ranks(parts, len(parts)):
        raise PartsMissingError(f"the parts of ranks {missing} are missing", missing)
    files = _check_parts(storage, folder, parts, pulse)
    storage.put_file(f"{folder}/{METADATA}", metadata)
    manifest = Manifest(
        step=step,
        world=len(parts),
        author=author,
        at=time.time(),
        layout=layout,
        torch=str(torch),  # torch's own is a str of its own kind
        bytes=sum(part.bytes for part in parts),
        files=(seal_file(METADATA, metadata), *files),
    )
    check_ownership(storage, author)
    pulse.add_bytes()
    storage.put_file(f"{folder}/{MANIFEST}", encode_manifest(manifest))
    return storage.url(storage.publish(folder, step))


def _check_parts(storage: Storage, folder: str, parts: Sequence[CheckpointPart], pulse: WritePulse) -> list[SealedFile]:
    """Return the manifest's entries for the parts; raises StorageError if a part is missing or has the wrong size."""
    files = [seal_file(part.name, encode_part(part)) for part in parts]

    def work(turns: Iterator[int]) -> None:
        for index in turns:
            part = parts[index]
            if storage.read(f"{folder}/{part.name}") != encode_part(part):
                raise StorageError(f"{storage.url(folder)}/{part.name} is missing, or not what rank {part.rank} wrote")
            if (size := storage.file_size(f"{folder}/{part.file}")) != part.bytes:
                raise StorageError(f"{storage.url(folder)}/{part.file} has {size or 0} bytes instead of {part.bytes}")
            pulse.add_bytes()

    run_in_threads(len(parts), SMALL_AT_ONCE, work)
    return files


def _resume_part(storage: Storage, draft: CheckpointPart, ranges: Sequence[memoryview]) -> CheckpointPart | None:
    """Return the part if an earlier attempt of this author has completed it with the same bytes; else None."""
    part = _read_part(storage, draft.rank)
    if not part or not part.done or part.bytes != draft.bytes or storage.file_size(part.file) != part.bytes:
        return None
    source, spare = MemoryRanges(ranges), spare_block()
    same = all(
        checksum_block(source.read_block(i, spare)) == part.block_checksum(i) for i in range(block_count(part.bytes))
    )
    return part if same else None


def _read_part(storage: Storage, rank: int) -> CheckpointPart | None:
    content = storage.read(part_name(rank))
    if content == b"":  # the mark of a part that has failed, where there was no room for the reason
        return CheckpointPart(rank=rank, bytes=0, blocks="", writer=this_process(), done=False, why=_NO_ROOM)
    try:
        return decode_part(content) if content else None
    except CorruptError:
        return None
