"""A power cut after every single write: whatever was not synced may be lost, and nobody who heard of it is misled."""

import collections
from pathlib import Path
from random import Random

import pytest

from holdfast.controller.decider_rebuild import rebuild_decider
from holdfast.core.decide.decider import Decider
from tests.journal.losing_disk import ACKS, LosingDisk, Op, build_recorder, put, record
from tests.journal.torn import entries, opened, write

BEGIN = """
import os, sys
from pathlib import Path
from tests.journal.torn import entries, opened
place = Path(sys.argv[1])
heard = os.open(place / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def append(journal, first, last):
    for entry in entries()[first:last]:
        journal.append(entry, durable=True)
        os.write(heard, f"entry:{entry.seq} ".encode())
def begin():
    journal = opened(place)
    os.write(heard, f"epoch:{journal.epoch} ".encode())
    return journal
"""
# A first life that ends well, one that goes on and copies its log into the file, and one that is raised and killed.
LIVES = """
journal = begin()
append(journal, 0, 40)
journal.close()
journal = begin()
journal._db.execute("pragma wal_autocheckpoint = 20")
append(journal, 40, 120)
journal._db.close()
journal = begin()
append(journal, 120, 125)
journal.raise_epoch(9)
os.write(heard, b"epoch:9 ")
append(journal, 125, 130)
"""
# An entry in the file is damaged: it is set aside with all that follow.
SET_ASIDE = """
journal = begin()
os.write(heard, f"kept:{sum(1 for _ in journal.read())} ".encode())
os._exit(0)
"""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = build_recorder(tmp_path_factory.mktemp("recorder"))
    if found is None:
        pytest.skip("no C compiler: what a process writes cannot be recorded")
    return found


def damaged(folder: Path) -> None:
    """Make a journal of two lives, the second killed, with one damaged entry in the file."""
    folder.mkdir()
    journal = opened(folder)
    write(journal, entries()[:100])
    journal.close()
    journal = opened(folder)
    write(journal, entries()[100:160])
    [(chain,)] = journal._db.execute("select chain from entry where seq = 80")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("-shm")}
    journal._db.close()
    at = files["journal.db"].index(chain)
    files["journal.db"] = files["journal.db"][:at] + bytes([chain[0] ^ 1]) + files["journal.db"][at + 1 :]
    put(files, folder)


def check(files: dict[str, bytes], folder: Path, heard: list[str]) -> str:
    """What a controller finds that is started after the power cut."""
    told = collections.defaultdict[str, int](int)
    for one in heard:
        what, number = one.split(":")
        told[what] = max(told[what], int(number))
    journal = opened(put(files, folder))
    found = tuple(rebuild_decider(journal, Decider()))
    lost, doubt, epoch = journal.lost, journal.doubt, journal.epoch
    journal.close()
    assert found == entries()[: len(found)], "what is there is what was written"
    assert epoch > told["epoch"], "a number that nodes know of is not used twice"
    assert len(found) >= told["kept"]
    if lost:
        assert (lost.kept, lost.of > lost.kept) == (len(found), True)
        return "told"
    assert len(found) >= told["entry"], "what was acknowledged was synced"
    return "doubt" if doubt else "same"


def cut_everywhere(ops: list[Op], disk: LosingDisk, folder: Path, *, most: int) -> collections.Counter[str]:
    """Cut the power after operations of every kind, up to `most` of them, and in each case lose all, some and none."""
    rng, outcomes = Random(11), collections.Counter[str]()
    wanted = set(range(len(ops))) if len(ops) <= most else set(rng.sample(range(len(ops)), most))
    for place, op in enumerate(ops):
        disk.do(op)
        if place in wanted and not op.path.endswith(ACKS):
            for share in (0.0, 0.5, 1.0):
                outcomes[check(disk.left(rng, share), folder, disk.heard)] += 1
    return outcomes


@pytest.mark.parametrize("most", [40, pytest.param(100_000, marks=pytest.mark.slow)], ids=["some", "all"])
def test_what_was_acknowledged_outlives_a_power_cut(tmp_path: Path, recorder: Path, most: int) -> None:
    """In three lives: made, written, copied from the log into the file, closed, opened again, raised."""
    living = tmp_path / "living"
    living.mkdir()
    disk = LosingDisk(living)
    ops = record(recorder, living, BEGIN + LIVES)
    outcomes = cut_everywhere(ops, disk, tmp_path / "found", most=most)
    assert outcomes["same"] > outcomes["doubt"] and not outcomes["told"], outcomes
    assert "epoch:9" in disk.heard and "entry:130" in disk.heard
    kinds = {(op.kind, Path(op.path).name) for op in ops}
    assert {("s", "journal.db"), ("w", "journal.db"), ("w", "journal.mark"), ("s", "living")} <= kinds


def test_a_journal_that_is_set_aside_is_never_between_two_places(tmp_path: Path, recorder: Path) -> None:
    """The damaged file is kept for inspection, and what was sound before the damage is there at every moment."""
    living = tmp_path / "living"
    damaged(living)
    before = {path.name: path.read_bytes() for path in living.iterdir()}
    sound = opened(put(before, tmp_path / "found"))
    kept = sum(1 for _ in sound.read())
    assert sound.lost and kept == 79
    sound.close()
    disk = LosingDisk(living)
    disk.heard = [f"kept:{kept}", "epoch:2"]
    ops = record(recorder, living, BEGIN + SET_ASIDE)
    outcomes = cut_everywhere(ops, disk, tmp_path / "found", most=len(ops))
    assert set(outcomes) == {"told"} and outcomes["told"] > 50, outcomes
    left = disk.left(Random(0), 0.0)
    [aside] = [name for name in left if name.startswith("damaged-") and name.endswith("journal.db")]
    assert left[aside] == before["journal.db"], "also on the disk"
