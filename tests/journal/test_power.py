"""Power cuts and disks that take nothing more: what was acknowledged is there, or is known to be missing."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from holdfast.journal.journal_errors import JournalError, JournalFullError
from holdfast.journal.sqlite_journal import SqliteJournal
from tests.journal.torn import FILES, came, entries, opened, write

ROOT = Path(__file__).parents[2]
BESIDE = 'mount -t tmpfs -o size=256k none "$0" && exec "$@"'
_HEADER, _FRAME = 32, 4096 + 24  # bytes, of a write-ahead log


def commits(folder: Path, count: int) -> Iterator[int]:
    """Write entry by entry; what was acknowledged, and before it the number of the entry."""
    journal = opened(folder)
    for entry in entries()[:count]:
        journal.append(entry, durable=True)
        yield entry.seq
    journal._db.close()


class Shot(msgspec.Struct, frozen=True):
    """The files at one instant."""

    db: bytes
    wal: bytes
    mark: bytes

    def put(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in zip(FILES, msgspec.structs.astuple(self), strict=True):
            (folder / name).write_bytes(content)
        return folder


def shot(folder: Path) -> Shot:
    return Shot(*((folder / name).read_bytes() for name in FILES))


def ends(before: bytes, after: bytes, rng: Random) -> list[int]:
    """Up to where a commit may have got with the log: to each frame, to somewhere, and to its last byte but one."""
    padded = before.ljust(len(after), b"\0")
    changed = [at for at in range(0, len(after), 64) if padded[at : at + 64] != after[at : at + 64]]
    first, last = changed[0], min(changed[-1] + 64, len(after))
    last = next(at for at in range(last - 1, first, -1) if padded[at] != after[at])
    frames = {at for at in range(_HEADER, len(after), _FRAME) if first <= at < last}
    return sorted({first, *frames, *(rng.randrange(first, last) for _ in range(3)), last})


@pytest.mark.parametrize("count", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_a_power_cut_at_every_commit(tmp_path: Path, count: int) -> None:
    """Somewhere within what the commit writes; all that was acknowledged before it is there or missed."""
    living, torn, rng = tmp_path / "living", tmp_path / "torn", Random(7)
    living.mkdir()
    cuts = 0
    before: Shot | None = None
    for seq in commits(living, count):
        after = shot(living)
        places = ends(before.wal, after.wal, rng) if before else []
        for end in places:
            assert before
            wal = after.wal[:end] + before.wal[end:]
            found = came(msgspec.structs.replace(before, wal=wal).put(torn), entries()[: seq - 1], epoch=2)
            assert found.what == "same", ("it was not acknowledged, and may be lost", seq, end)
            found = came(msgspec.structs.replace(after, wal=wal).put(torn), entries()[:seq], epoch=2)
            assert (found.what, found.kept) == ("told", seq - 1), (seq, end)
            cuts += 1
        before = after
    assert cuts > 3 * count


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """What was there before is whole, and known to be."""
    journal = opened(tmp_path)
    for entry in entries()[:20]:
        journal.append(entry, durable=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / FILES[1]).stat().st_size, limits[1]))
    try:
        with pytest.raises(JournalError, match=r"journal\.db "):
            write(journal, entries()[20:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal._db.close()
    again = opened(tmp_path)
    assert again.lost is None and not again.doubt and len(list(again.read())) >= 20
    again.close()


FILL = """
import sys
from pathlib import Path
from holdfast.journal.sqlite_journal import JournalFullError
from tests.journal.torn import entries, opened
place = Path(sys.argv[1])
journal, kept = opened(place), 0
try:
    for entry in entries():
        journal.append(entry, durable=True)
        kept = entry.seq
except JournalFullError as e:
    print(e)
journal._db.close()
for found in place.glob("filler"):
    found.unlink()
try:
    again = opened(place)
    print(kept, again.lost, again.doubt, len(list(again.read())))
except JournalFullError as e:
    print(kept, e)
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    command = ["unshare", "-rm", "sh", "-c", BESIDE, str(tmp_path), sys.executable, "-c", FILL, str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if "unshare" in run.stderr or "mount" in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    full, after = run.stdout.splitlines()
    assert full.endswith("the disk that holds it is full")
    kept, *rest = after.split(maxsplit=1)
    assert int(kept) > 0 and (rest[0].endswith("is full") or rest[0].startswith("None "))


def test_no_room_for_a_mark_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteJournal(tmp_path / "journal.db").close()

    def pwrite(fd: int, content: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(JournalFullError, match=r"journal\.mark "):
        opened(tmp_path)
