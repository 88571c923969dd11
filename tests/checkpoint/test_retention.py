"""What is kept, what is removed, and what is left alone because nobody can be sure."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import storage_owner
from holdfast.checkpoint.checkpoint_publication import staging_folder, write_part
from holdfast.checkpoint.checkpoint_reader import verify_checkpoint
from holdfast.checkpoint.doubt_notes import UnknownDoubtsError
from holdfast.checkpoint.local_storage import LocalStorage
from holdfast.checkpoint.manifest import MANIFEST, Author, WriterProcess, encode_part
from holdfast.checkpoint.retention import clean_unpublished, find_surplus, retain_checkpoints
from holdfast.checkpoint.storage_errors import StorageError, TakenOverError
from holdfast.checkpoint.stored_checkpoints import (
    StoredCheckpoint,
    apply_doubts,
    find_checkpoints,
    find_rival,
    mark_doubts,
)
from holdfast.model.state_doubt import Doubt
from tests.checkpoint.making import save

ME = Author(2, "run")


def names(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir() if not path.name.startswith(".holdfast"))


def steps(base: Path) -> list[int]:
    return [one.step for one in find_checkpoints(str(base))]


def begin(base: Path, step: int, author: Author) -> Path:
    """A write that does not come to its end."""
    folder = staging_folder(str(base), step, author)
    write_part(folder, 0, [memoryview(b"some")])
    return Path(folder)


def test_the_newest_come_first_and_the_rest_is_passed_over(tmp_path: Path) -> None:
    for step in (3, 20, 100):
        save(tmp_path, step)
    begin(tmp_path, 200, ME)
    (tmp_path / "step-00000300").mkdir()  # never published, or not ours
    (tmp_path / "notes.txt").touch()
    (tmp_path / "step-00000020" / "holdfast.json").write_text("{}")
    found = find_checkpoints(str(tmp_path))
    assert [(one.step, one.ok) for one in found] == [(100, True), (20, False), (3, True)]
    assert found[1].why.startswith(f"{MANIFEST} ")
    assert find_checkpoints(str(tmp_path / "nowhere")) == ()


def test_the_last_ones_and_every_so_many_are_kept(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, step)
        retain_checkpoints(str(tmp_path), keep=2, every=4, newest=step)
    assert steps(tmp_path) == [8, 7, 4]
    assert names(tmp_path) == ["step-00000004", "step-00000007", "step-00000008"]
    assert [verify_checkpoint(one.url) for one in find_checkpoints(str(tmp_path))] == [()] * 3
    assert retain_checkpoints(str(tmp_path), keep=0) == ()
    assert steps(tmp_path) == [8, 7, 4]


def test_a_broken_one_is_not_counted(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000003" / "holdfast.json").write_text("broken")
    assert [Path(url).name for url in retain_checkpoints(str(tmp_path), keep=1)] == ["step-00000001"]
    save(tmp_path, 4)
    assert [Path(url).name for url in retain_checkpoints(str(tmp_path), keep=1)] == ["step-00000003", "step-00000002"]


def test_after_going_back_the_abandoned_line_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(tmp_path, 15, author=Author(3, "run"))
    assert [Path(url).name for url in retain_checkpoints(str(tmp_path), keep=1, newest=15)] == ["step-00000010"]
    save(tmp_path, 20, author=Author(3, "run"))
    retain_checkpoints(str(tmp_path), keep=1, newest=20)
    assert names(tmp_path) == ["step-00000020.2", "step-00000030"]


def found(step: int, ok: bool, at: float) -> StoredCheckpoint:
    return StoredCheckpoint(step=step, url=f"{step}@{at}", ok=ok, at=at)


@given(
    kinds=st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=12),
    keep=st.integers(1, 4),
    every=st.integers(0, 5),
    newest=st.none() | st.integers(0, 20),
)
def test_good_ones_are_never_removed_below_the_number_kept(
    kinds: list[tuple[int, bool]], keep: int, every: int, newest: int | None
) -> None:
    every_one = [found(step, ok, float(number)) for number, (step, ok) in enumerate(kinds)]
    every_one.sort(key=lambda one: (one.step, one.at), reverse=True)
    gone = find_surplus(every_one, keep, every, newest=newest)
    left = [one for one in every_one if one not in gone]

    def good(some: list[StoredCheckpoint]) -> list[int]:
        line = {one.step for one in some if one.ok and (newest is None or one.step <= newest)}
        return sorted(line, reverse=True)

    assert good(left)[:keep] == good(every_one)[:keep]
    for step in good(every_one)[:keep]:  # and of each the last write
        last = max(one.at for one in every_one if one.step == step and one.ok)
        assert last in [one.at for one in left if one.step == step]
    if every:
        assert {step for step in good(every_one) if step % every == 0} <= set(good(left))
    assert not [one for one in gone if newest is not None and one.step > newest]
    assert find_surplus(left, keep, every, newest=newest) == ()


@pytest.mark.parametrize("where", ["", "memory://"])
def test_what_is_in_doubt_is_marked_for_all_runs(tmp_path: Path, where: str) -> None:
    base = f"{where}{tmp_path}"
    for step, author in ((10, ME), (20, Author(2, "other")), (20, ME), (30, ME), (20, Author(3, "run"))):
        save(base, step, author=author)
    assert mark_doubts(base, "run", (Doubt(generation=2, not_after=30),)) == ()
    doubts = (Doubt(generation=2, not_after=10),)
    assert mark_doubts(base, "run", doubts) == (20, 30)
    found = find_checkpoints(base)
    assert [(one.step, one.author) for one in found if one.doubted] == [(30, ME), (20, ME)]
    assert [one.ok for one in found if not one.doubted] == [True] * 3
    assert mark_doubts(base, "run", doubts) == (), "they are"
    assert mark_doubts(base, "other", (Doubt(generation=9, not_after=0),)) == (20,)
    assert mark_doubts(base, "run", (Doubt(generation=3, not_after=10),)) == (20,), "of another generation, as well"
    assert [one.step for one in find_checkpoints(base) if one.ok] == [10]


def test_later_runs_may_use_a_state_from_which_sound_steps_were_made_twice(tmp_path: Path) -> None:
    base = str(tmp_path)
    for step in (50, 60):
        save(base, step, author=ME)
    doubts = (Doubt(generation=2, not_after=49, until=59),)
    told = apply_doubts(find_checkpoints(base), ME.run, doubts)
    assert [one.ok for one in told] == [False, False], "this run tries an older one"
    assert mark_doubts(base, ME.run, doubts) == (60,)
    assert [one.step for one in find_checkpoints(base) if one.ok] == [50]


def _flip_byte(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_a_damaged_note_of_doubts_forgets_none(tmp_path: Path) -> None:
    """Whichever byte it is; and without the copy nobody says that all is well."""
    for step, author in ((10, ME), (20, ME), (30, Author(2, "other"))):
        save(tmp_path, step, author=author)
    mark_doubts(str(tmp_path), "run", (Doubt(generation=2, not_after=10),))
    note, spare = tmp_path / ".holdfast-doubts.json", tmp_path / ".holdfast-doubts-copy.json"
    sound = note.read_bytes()
    for at in range(len(sound)):
        note.write_bytes(sound)
        _flip_byte(note, at)
        assert [one.step for one in find_checkpoints(str(tmp_path)) if one.ok] == [30, 10], at
    copy = spare.read_bytes()
    for damage in (b"", b"[", sound[:-1]):
        note.write_bytes(damage)
        spare.write_bytes(copy[:-1])
        found = find_checkpoints(str(tmp_path))
        assert [one.unvouched and one.doubted and not one.ok for one in found] == [True] * 3
        why = f"nobody can tell which checkpoints are in doubt: {note} is not as it was written"
        assert found[0].why == f"{why}; remove .holdfast-doubts.json to use all checkpoints that are there"
        assert retain_checkpoints(str(tmp_path), keep=1, newest=30) == (), "none is known to be good"
    note.unlink()
    assert [one.step for one in find_checkpoints(str(tmp_path)) if one.ok] == [30, 20, 10], "a person wants it so"


def test_a_run_vouches_for_its_own_where_the_note_is_damaged(tmp_path: Path) -> None:
    base, doubts = str(tmp_path), (Doubt(generation=2, not_after=10),)
    for step in (10, 20):
        save(tmp_path, step, author=ME)
    (tmp_path / ".holdfast-doubts.json").write_bytes(b"")
    told = apply_doubts(find_checkpoints(base), "run", doubts)
    assert [(one.step, one.ok, one.unvouched) for one in told] == [(20, False, False), (10, True, False)]
    assert [one.ok for one in apply_doubts(find_checkpoints(base), "", doubts)] == [False, False]
    save(tmp_path, 30, author=Author(2, "other"))
    with pytest.raises(UnknownDoubtsError):
        mark_doubts(base, "run", doubts)
    shutil.rmtree(tmp_path / "step-00000030")
    assert mark_doubts(base, "run", doubts) == (20,), "and the note is sound again"
    assert [(one.step, one.ok, one.unvouched) for one in find_checkpoints(base)] == [
        (20, False, False),
        (10, True, False),
    ]


def test_a_note_of_doubts_without_a_seal_is_read(tmp_path: Path) -> None:
    save(tmp_path, 10, author=ME)
    (tmp_path / ".holdfast-doubts.json").write_text('[{"run":"run","doubts":[{"generation":2,"not_after":5}]}]')
    assert [one.why for one in find_checkpoints(str(tmp_path))] == ["states after step 5 of generation 2 are in doubt"]


def test_a_doubted_one_does_not_count_as_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, author=ME)
    mark_doubts(str(tmp_path), "run", (Doubt(generation=2, not_after=20),))
    assert retain_checkpoints(str(tmp_path), keep=2, newest=30) == ()
    save(tmp_path, 30, author=Author(3, "run"))
    assert [Path(url).name for url in retain_checkpoints(str(tmp_path), keep=1, newest=30)] == [
        "step-00000030",
        "step-00000020",
        "step-00000010",
    ]


def test_whoever_begins_a_step_has_given_up_its_earlier_ones(tmp_path: Path) -> None:
    other = begin(tmp_path, 10, Author(1, "other"))  # by this process, which lives
    early, late = begin(tmp_path, 20, ME), begin(tmp_path, 30, ME)
    assert clean_unpublished(str(tmp_path), ME) == ()
    assert clean_unpublished(str(tmp_path), ME, before=30) == (str(early),)
    assert other.exists() and late.exists()


def test_a_write_that_cannot_even_begin_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(storage: LocalStorage, name: str, content: bytes) -> None:
        raise StorageError(f"{name} cannot be written: No space left on device")

    monkeypatch.setattr(LocalStorage, "put_file", refuse)
    with pytest.raises(StorageError):
        begin(tmp_path / "ckpt", 10, ME)
    assert list((tmp_path / "ckpt").iterdir()) == []


def test_writes_of_older_generations_are_removed_and_others_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 5, author=ME)
    dead = [begin(tmp_path, 4, Author(1, "run")), begin(tmp_path, 9, Author(1, "run")), begin(tmp_path, 4, ME)]
    alive = [begin(tmp_path, 6, ME), begin(tmp_path, 6, Author(3, "run")), begin(tmp_path, 1, Author(1, "other"))]
    assert sorted(clean_unpublished(str(tmp_path), ME)) == sorted(map(str, dead))
    assert names(tmp_path) == sorted([*(path.name for path in alive), "step-00000005"])


def test_of_another_run_only_what_a_dead_process_wrote_is_removed(tmp_path: Path) -> None:
    folder = begin(tmp_path, 7, Author(9, "other"))
    part = write_part(str(folder), 1, [memoryview(b"more")])
    host = part.writer.host
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def written_by(writer: WriterProcess) -> None:
        part_of_other = type(part)(rank=1, bytes=4, blocks="", writer=writer, done=False)
        (folder / part.name).write_bytes(encode_part(part_of_other))

    written_by(WriterProcess(host, ended.pid, 1))
    assert clean_unpublished(str(tmp_path), ME) == ()  # the writer of rank 0 lives: this test
    (folder / "__0_0.json").unlink()
    written_by(WriterProcess("elsewhere", ended.pid, 1))
    assert clean_unpublished(str(tmp_path), ME) == ()  # nobody here can tell
    written_by(WriterProcess(host, os.getpid(), storage_owner.this_process().start))
    assert clean_unpublished(str(tmp_path), ME) == ()
    written_by(WriterProcess(host, os.getpid(), 1))  # the number is in use again, by another process
    assert clean_unpublished(str(tmp_path), ME) == (str(folder),)
    assert names(tmp_path) == []


def test_a_folder_that_is_replaced_is_taken_again_and_said(tmp_path: Path) -> None:
    base, fence = tmp_path / "ckpt", tmp_path / "ckpt" / ".holdfast-author.json"
    owned, notes = storage_owner.OwnedStorages(), list[str]()

    def take(step: int, author: Author = ME) -> str:
        notes.clear()
        assert owned.take(str(base), author, step, notes) and fence.exists()
        return "; ".join(notes)

    assert take(1) == "" and not owned.take(str(base), ME, 2, notes) and not notes
    shutil.rmtree(base)
    removed = f"{base} was removed; it is made anew, without the checkpoints that were there"
    assert take(3) == f"before step 3 was written, {removed}"
    base.rename(tmp_path / "gone")
    base.mkdir()  # the old folder is still there, so this one has another inode
    there = f"was put in place of {base}; checkpoints go there now, and earlier ones are not there"
    assert take(4) == f"before step 4 was written, another folder {there}"
    fence.unlink()
    lost = f"{base} lost its file .holdfast-author.json, which is written again: were checkpoints removed there?"
    assert take(5) == f"before step 5 was written, {lost}"
    shutil.rmtree(base)
    assert take(6, Author(3, "run")) == f"before step 6 was written, {removed}", "between two generations too"
    base.rename(tmp_path / "gone2")
    base.symlink_to(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        assert take(7, Author(3, "run")) == f"before step 7 was written, another file system {there}"
    finally:
        shutil.rmtree(base.resolve())


def test_an_owner_file_that_is_damaged_is_told_and_written_again(tmp_path: Path) -> None:
    """One digit of it, and no step was written any more: another generation was said to have taken over."""
    base, fence = tmp_path / "ckpt", tmp_path / "ckpt" / ".holdfast-author.json"
    owned, notes = storage_owner.OwnedStorages(), list[str]()
    assert owned.take(str(base), ME, 1, notes)
    whole = fence.read_bytes()
    for at in range(len(whole)):
        fence.write_bytes(whole[:at] + bytes([whole[at] ^ 2]) + whole[at + 1 :])
        storage_owner.check_ownership(LocalStorage(str(base)), ME)
        assert owned.take(str(base), ME, 2, notes), at
        assert notes == [f"{fence} was not as written, before step 2; it is written again"]
        notes.clear()
        assert not owned.take(str(base), ME, 3, notes) and not notes, "it is sound again"
    fence.write_bytes(b"")
    assert owned.take(str(base), ME, 4, notes) and [note.partition(" ")[0] for note in notes] == [str(fence)]
    assert not owned.take(str(base), ME, 5, notes)


def test_an_owner_file_of_an_earlier_version_counts(tmp_path: Path) -> None:
    (tmp_path / ".holdfast-author.json").write_text('{"generation":9,"run":"run"}')
    with pytest.raises(TakenOverError, match=f"^generation 9 .* {tmp_path}, so generation {ME.generation} "):
        storage_owner.check_ownership(LocalStorage(str(tmp_path)), ME)


def test_a_folder_that_is_mounted_anew_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a network's file system is mounted again, the folder has another device number, and all that it had."""
    base, notes = str(tmp_path / "ckpt"), list[str]()
    owned = storage_owner.OwnedStorages()
    assert owned.take(base, ME, 1, notes)
    device, inode = LocalStorage(base).read_identity() or (0, 0)
    monkeypatch.setattr(LocalStorage, "read_identity", lambda _: (device + 1, inode))
    assert not owned.take(base, ME, 2, notes) and notes == []
    (tmp_path / "ckpt" / ".holdfast-author.json").unlink()
    assert owned.take(base, ME, 3, notes) and f"{base} " in notes[0] and " .holdfast-author.json" in notes[0]


def test_a_folder_with_checkpoints_that_is_put_in_place_is_not_said_to_lack_them(tmp_path: Path) -> None:
    base, notes = tmp_path / "ckpt", list[str]()
    owned = storage_owner.OwnedStorages()
    assert owned.take(str(base), ME, 1, notes)
    base.rename(tmp_path / "gone")
    base.mkdir()
    assert owned.take(str(base), ME, 2, notes) and notes.pop().endswith("and earlier ones are not there")
    (tmp_path / "gone" / ".holdfast-author.json").unlink()
    (tmp_path / "gone" / "step-00000001").mkdir()
    base.rename(tmp_path / "empty")
    (tmp_path / "gone").rename(base)
    assert owned.take(str(base), ME, 3, notes) and notes.pop().endswith("checkpoints go there now")


def test_a_run_that_lives_keeps_its_path_and_what_it_writes_there(tmp_path: Path) -> None:
    """Another one is told, takes the path when the first has ended, and removes nothing that is not of its line."""
    base, other = str(tmp_path), Author(1, "other.1")
    take = f"storage_owner.take_ownership({base!r}, Author(1, 'first.1')); print(flush=True); sys.stdin.read()"
    code = f"import sys; from holdfast.checkpoint import storage_owner; from {Author.__module__} import Author; {take}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout and first.stdout.readline()
        save(tmp_path, 5, author=Author(1, "first.1"))
        told = rf"run first \(pid {first.pid} on .*\) is writing to {base} now"
        assert re.match(rf"{told} \(step 5 \d+ s ago\): give another path", find_rival(base, "other"))
        assert not find_rival(base, "first"), "it is we"
        with pytest.raises(TakenOverError, match=told):
            storage_owner.take_ownership(base, other)
    assert not find_rival(base, "other"), "no lock outlives its process"
    storage_owner.take_ownership(base, other)
    fence = (tmp_path / ".holdfast-author.json").read_bytes()
    (tmp_path / ".holdfast-author.json").unlink()
    save(tmp_path, 7, author=Author(1, "first.1"))  # it was on another host, and about to publish
    (tmp_path / ".holdfast-author.json").write_bytes(fence)
    save(tmp_path, 8, author=other)
    retain_checkpoints(base, 1, newest=8)
    assert steps(tmp_path) == [8, 7, 5], "both were written since this process began"


def test_a_copy_of_a_folder_that_a_run_writes_to_is_free(tmp_path: Path) -> None:
    base, other = tmp_path / "ckpt", Author(1, "other.1")
    take = f"storage_owner.take_ownership({str(base)!r}, Author(1, 'first.1')); print(flush=True); sys.stdin.read()"
    code = f"import sys; from holdfast.checkpoint import storage_owner; from {Author.__module__} import Author; {take}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout and first.stdout.readline()
        shutil.copytree(base, tmp_path / "copy")
        (tmp_path / "link").symlink_to(base)
        assert find_rival(str(base), "other") and find_rival(str(tmp_path / "link"), "other")
        assert not find_rival(str(tmp_path / "copy"), "other")
        storage_owner.take_ownership(str(tmp_path / "copy"), other)
        owner = storage_owner.read_owner(LocalStorage(str(tmp_path / "copy")))
        assert owner and (owner.run, owner.url) == ("other.1", str(tmp_path / "copy"))
        base.rename(tmp_path / "moved")
        assert find_rival(str(tmp_path / "moved"), "other"), "the same folder, and it may write on"


def test_a_removal_that_was_cut_short_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = Path(save(tmp_path, 1))
    save(tmp_path, 2)
    url.rename(tmp_path / ".step-00000001.gone-abcd")
    (tmp_path / ".step-00000001.gone-abcd" / "holdfast.json").unlink()
    assert steps(tmp_path) == [2]
    clean_unpublished(str(tmp_path), ME)
    assert names(tmp_path) == ["step-00000002"]


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    base = tmp_path / "base"
    folder = begin(base, 1, Author(1, "run"))
    (folder / "link").symlink_to(kept)
    clean_unpublished(str(base), ME)
    assert names(base) == []
    assert (kept / "file").exists()
