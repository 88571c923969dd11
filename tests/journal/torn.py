"""A real journal with its mark, what is done to its bytes, and what may come of it."""

import functools
import shutil
from pathlib import Path
from random import Random

import msgspec

from holdfast.controller.decider_rebuild import RebuildError, rebuild_decider
from holdfast.core.decide.decider import Decider
from holdfast.journal.journal_errors import JournalError
from holdfast.journal.sqlite_journal import SqliteJournal
from holdfast.model.decider_events import Successor
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Entry
from holdfast.sim.checked_seed_run import simulate
from tests.sim.test_checked_seed_run import shortly

FILES = ("journal.db", "journal.db-wal", "journal.mark")


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Of a simulated job with some incidents."""
    found: list[Entry] = []
    simulate(shortly(5), found.append)
    return tuple(found[:300])


def opened(folder: Path) -> SqliteJournal:
    return SqliteJournal(folder / "journal.db", mark_path=folder / "journal.mark")


def write(journal: SqliteJournal, found: tuple[Entry, ...]) -> None:
    for entry in found:
        journal.append(entry, durable=bool(entry.decision.actions))
    journal.flush()


def made(folder: Path) -> tuple[Entry, ...]:
    """What a controller leaves behind that was killed in its second life: entries in the file, and some in its log."""
    folder.mkdir()
    written, living = entries(), folder / "living"
    living.mkdir()
    first = opened(living)
    write(first, written[:200])
    second = opened(living)  # as if the first had been killed
    write(second, written[200:])
    for name in FILES:
        shutil.copy2(living / name, folder / name)
    first._db.close()
    second.close()
    shutil.rmtree(living)
    return written


def copied(source: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in FILES:
        if (source / name).exists():
            shutil.copy2(source / name, folder / name)
    return folder


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """What came of opening it."""

    what: str  # "same", "told": entries are lost; "doubt": nobody knows; "refused"
    said: str = ""
    kept: int = 0


def came(folder: Path, written: tuple[Entry, ...], *, epoch: int = 3) -> Came:
    """Open it as a controller does, the third at least, and take over; other errors than a journal's go through."""
    try:
        journal = opened(folder)
    except JournalError as e:
        return Came(what="refused", said=str(e))
    decider = Decider()
    try:
        found = tuple(rebuild_decider(journal, decider))
    except (JournalError, RebuildError) as e:
        journal.close()
        return Came(what="refused", said=str(e))
    lost, doubt = journal.lost, journal.doubt
    assert journal.epoch == epoch
    journal.close()
    assert found == written[: len(found)], "what is kept is what was written"
    if found and decider.view.phase is not Phase.DONE:
        taken = decider.step(found[-1].at, Successor(epoch=epoch, lost=lost))
        assert bool(lost) == any("journal" in str(action) for action in taken.actions)
    if lost:
        assert (lost.kept, lost.of > lost.kept) == (len(found), True)
        return Came(what="told", kept=len(found))
    assert len(found) == len(written), "a loss that nobody tells of"
    return Came(what="doubt" if doubt else "same", said=doubt, kept=len(found))


def flip(path: Path, rng: Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 8, 64))):
        at = rng.randrange(len(content))
        content[at] ^= rng.randrange(1, 256)
    path.write_bytes(content)


def cut(path: Path, rng: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def blank(path: Path, rng: Random) -> None:
    """A block that a disk has forgotten."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(0, len(content), 512)
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)


def remove(path: Path, rng: Random) -> None:
    path.unlink()


HARMS = {"flip": flip, "cut": cut, "blank": blank, "remove": remove}
