"""The note at a storage that says which of its checkpoints are in doubt, so that no later run restores them."""

import msgspec

from holdfast.checkpoint.manifest import content_digest
from holdfast.checkpoint.storage_errors import CorruptError, StorageError
from holdfast.checkpoint.storage_opener import Storage
from holdfast.decoding import from_json
from holdfast.model.state_doubt import Doubt

DOUBTS = ".holdfast-doubts.json"
_SPARE = ".holdfast-doubts-copy.json"  # written first, and read only if the other is there and is damaged


class DoubtedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run some of whose checkpoints are in doubt."""

    run: str
    doubts: tuple[Doubt, ...]


class DoubtNote(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the doubt note's file: all runs with checkpoints in doubt, and a digest of them."""

    runs: tuple[DoubtedRun, ...]
    seal: str = ""  # digest of the above


class UnknownDoubtsError(StorageError):
    """Says in one sentence why nobody can tell which checkpoints are in doubt, and how to go on."""


def read_doubts(storage: Storage) -> tuple[DoubtedRun, ...]:
    """Return the runs with checkpoints in doubt; () if there is no note, for example because a person removed it. If
    the note is damaged, use its copy. Raise UnknownDoubtsError if the copy is missing or damaged too."""
    try:
        content = storage.read(DOUBTS)
        return _decode_note(content) if content is not None else ()
    except StorageError as e:
        why = f"{storage.url(DOUBTS)} {e}" if isinstance(e, CorruptError) else str(e)
    try:
        if (content := storage.read(_SPARE)) is not None:
            return _decode_note(content)
    except StorageError:
        pass  # the sentence is about the first
    mend = f"remove {DOUBTS} to use all checkpoints that are there"
    raise UnknownDoubtsError(f"nobody can tell which checkpoints are in doubt: {why}; {mend}")


def write_doubts(storage: Storage, runs: tuple[DoubtedRun, ...]) -> None:
    content = _encode_note(DoubtNote(runs=runs))
    storage.put_file(_SPARE, content)
    storage.put_file(DOUBTS, content)


def _encode_note(note: DoubtNote) -> bytes:
    seal = content_digest(msgspec.json.encode(note.runs))
    return msgspec.json.encode(msgspec.structs.replace(note, seal=seal))


def _decode_note(content: bytes) -> tuple[DoubtedRun, ...]:
    try:
        if content.startswith(b"["):  # as it was written before it had a seal
            return from_json(content, tuple[DoubtedRun, ...])
        note = from_json(content, DoubtNote)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CorruptError("is not as it was written") from None
    if _encode_note(note) != content:
        raise CorruptError("is not as it was written")
    return note.runs
