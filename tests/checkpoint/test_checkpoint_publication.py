"""Writing parts and publishing them: what is refused, what is resumed, and trouble at every operation."""

import contextlib
import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.checkpoint import checkpoint_publication, direct_io, local_storage
from holdfast.checkpoint.checkpoint_publication import (
    UNKNOWN,
    collect_parts,
    forsake_parts,
    publish_checkpoint,
    staging_folder,
    wait_until_begun,
    write_part,
)
from holdfast.checkpoint.checkpoint_reader import read_manifest, read_metadata, read_part, verify_checkpoint
from holdfast.checkpoint.manifest import BLOCK_BYTES, Author, CheckpointPart
from holdfast.checkpoint.retention import clean_unpublished
from holdfast.checkpoint.storage_errors import (
    PartFailedError,
    PartsMissingError,
    StorageError,
    TakenOverError,
    WriteGivenUpError,
)
from holdfast.checkpoint.storage_opener import Storage
from holdfast.checkpoint.storage_owner import take_ownership
from holdfast.checkpoint.stored_checkpoints import find_checkpoints
from holdfast.checkpoint.write_lane import WriteLane, WriteOutcome, WritePulse
from tests.checkpoint.making import METADATA, content, in_pages, save

ROOT = Path(__file__).parents[2]
ME = Author(1)


def put(base: Path, step: int, rank: int, size: int = 1000, author: Author = ME) -> CheckpointPart:
    return write_part(staging_folder(str(base), step, author), rank, [in_pages(content(size, 1000 * step + rank))])


def test_a_checkpoint_is_written_and_read(tmp_path: Path) -> None:
    base = tmp_path / "not yet" / "there"
    url = save(base, 12, sizes=(BLOCK_BYTES + 77, 0, 5000))
    assert url == str(base / "step-00000012")
    assert [path.name for path in base.iterdir()] == ["step-00000012"]
    assert verify_checkpoint(url) == ()
    assert read_metadata(url) == METADATA
    assert (base / "step-00000012" / "__2_0.distcp").read_bytes() == content(5000, 12002)
    manifest = read_manifest(url)
    assert (manifest.step, manifest.world, manifest.bytes) == (12, 3, BLOCK_BYTES + 77 + 5000)
    memory = in_pages(bytes(BLOCK_BYTES + 77))
    assert read_part(url, 0, memory) == len(memory)
    assert bytes(memory) == content(BLOCK_BYTES + 77, 12000)


def test_nothing_is_seen_before_it_is_published(tmp_path: Path) -> None:
    parts = [put(tmp_path, 1, 0)]
    assert find_checkpoints(str(tmp_path)) == ()
    publish_checkpoint(str(tmp_path), 1, parts, METADATA, author=ME)
    assert [one.step for one in find_checkpoints(str(tmp_path))] == [1]


def test_the_same_step_again_does_not_touch_the_first(tmp_path: Path) -> None:
    first = save(tmp_path, 5)
    second = save(tmp_path, 5, sizes=(2000,), author=Author(2))
    third = save(tmp_path, 5, sizes=(3000,), author=Author(3))
    assert [one.url for one in find_checkpoints(str(tmp_path))] == [third, second, first]
    assert verify_checkpoint(first) == verify_checkpoint(second) == verify_checkpoint(third) == ()


def test_parts_that_do_not_make_a_whole_are_refused(tmp_path: Path) -> None:
    parts = [put(tmp_path, 1, rank) for rank in range(3)]
    folder = Path(staging_folder(str(tmp_path), 1, ME))
    with pytest.raises(PartsMissingError) as missing:
        publish_checkpoint(str(tmp_path), 1, [parts[0], parts[2]], METADATA, author=ME)
    assert missing.value.ranks == (1,)
    (folder / parts[1].file).write_bytes(b"short")
    with pytest.raises(StorageError, match=r"__1_0\.distcp .*\b5 bytes.* 1000"):
        publish_checkpoint(str(tmp_path), 1, parts, METADATA, author=ME)
    (folder / parts[1].name).unlink()
    with pytest.raises(StorageError, match=r"__1_0\.json .*rank 1\b"):
        publish_checkpoint(str(tmp_path), 1, parts, METADATA, author=ME)
    assert find_checkpoints(str(tmp_path)) == ()


def test_a_part_that_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = put(tmp_path, 1, 0, size=BLOCK_BYTES + 5)
    file = Path(staging_folder(str(tmp_path), 1, ME), first.file)
    before = file.stat()
    pulse = WritePulse()
    again = write_part(str(file.parent), 0, [memoryview(content(BLOCK_BYTES + 5, 1000))], pulse=pulse)
    assert again == first
    assert (file.stat().st_ino, pulse.bytes) == (before.st_ino, BLOCK_BYTES + 5)
    changed = write_part(str(file.parent), 0, [memoryview(content(BLOCK_BYTES + 5, 7))])
    assert changed.blocks != first.blocks
    assert file.read_bytes() == content(BLOCK_BYTES + 5, 7)


def test_parts_are_waited_for_and_named_when_they_do_not_come(tmp_path: Path) -> None:
    folder = staging_folder(str(tmp_path), 1, ME)
    first = put(tmp_path, 1, 0)
    with pytest.raises(PartsMissingError) as missing:
        collect_parts(folder, 3, wait_s=0)
    assert missing.value.ranks == (1, 2)
    late = threading.Timer(0.3, lambda: [put(tmp_path, 1, rank) for rank in (1, 2)])
    late.start()
    parts = collect_parts(folder, 3, wait_s=60)
    late.join()
    assert [part.rank for part in parts] == [0, 1, 2]
    assert parts[0] == first


@pytest.mark.parametrize("drafted", [True, False])
def test_a_part_that_fails_on_a_full_disk_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafted: bool
) -> None:
    """The mark of the failure takes no room: it is written over the draft, or is an empty file."""
    put(tmp_path, 5, 0)
    folder, real, puts = staging_folder(str(tmp_path), 5, ME), local_storage._put_file, itertools.count()

    def put_file(path: str, content: bytes) -> None:
        if next(puts) >= drafted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    def write_file(*args: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(local_storage, "_put_file", put_file)
        full.setattr(local_storage, "write_file", write_file)
        with pytest.raises(StorageError, match=os.strerror(errno.ENOSPC)):
            put(tmp_path, 5, 1)
    with pytest.raises(
        PartFailedError, match=os.strerror(errno.ENOSPC) if drafted else checkpoint_publication._NO_ROOM
    ) as failed:
        collect_parts(folder, 2, wait_s=0.5)
    assert failed.value.rank == 1
    assert not checkpoint_publication.has_failed(folder)
    checkpoint_publication.withdraw_write(folder, 3, str(failed.value))
    assert checkpoint_publication.has_failed(folder), "others can tell, though rank 2 may still write"
    assert not (Path(folder) / "__0_0.distcp").exists()
    checkpoint_publication.withdraw_write(folder, 2, str(failed.value))
    assert not Path(folder).exists() and checkpoint_publication.has_failed(folder)


def test_why_a_part_failed_is_masked_before_it_stands_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 5, 0)
    folder = Path(staging_folder(str(tmp_path), 5, ME))

    def write_file(*args: object) -> str:
        raise OSError(errno.EIO, f"https://jane:correct-horse@storage.example.org/b {'x ' * 450} {'y' * 60}")

    with monkeypatch.context() as broken:
        broken.setattr(local_storage, "write_file", write_file)
        with pytest.raises(StorageError):
            put(tmp_path, 5, 1)
    with pytest.raises(PartFailedError, match=r"<credentials>@storage\.example\.org"):
        collect_parts(str(folder), 2, wait_s=0.5)
    assert not [path for path in folder.iterdir() if b"correct-horse" in path.read_bytes()]


def test_a_rank_says_of_which_steps_nothing_comes_from_it(tmp_path: Path) -> None:
    for step in (1, 3, 5):
        put(tmp_path, step, 0)
    done = put(tmp_path, 2, 1)
    put(tmp_path, 4, 0, author=Author(2))

    def waits_for(step: int, author: Author = ME) -> tuple[int, ...]:
        with pytest.raises(PartsMissingError) as told:
            collect_parts(staging_folder(str(tmp_path), step, author), 2, wait_s=0)
        return told.value.ranks

    def forsaken(step: int) -> int:
        with pytest.raises(PartFailedError) as told:
            collect_parts(staging_folder(str(tmp_path), step, ME), 2, wait_s=0)
        return told.value.rank

    forsake_parts(str(tmp_path), ME, 1, {1, 2, 7}, before=5)
    assert forsaken(1) == 1
    assert waits_for(3) == (1,), "that it did not say"
    assert waits_for(2) == (0,), "what is done stays"
    put(tmp_path, 2, 0)
    assert done in collect_parts(staging_folder(str(tmp_path), 2, ME), 2, wait_s=0)
    assert not list(tmp_path.glob("*7*")), "rank 0 never began it"

    forsake_parts(str(tmp_path), ME, 1, {UNKNOWN}, before=5)
    assert forsaken(3) == 1
    for step, author in ((4, Author(2)), (5, ME)):  # another's, and what is still to come
        assert waits_for(step, author) == (1,)


def test_an_older_generation_cannot_publish(tmp_path: Path) -> None:
    old, new = Author(3, "run"), Author(4, "run")
    take_ownership(str(tmp_path), old)
    part = put(tmp_path, 1, 0, author=old)
    take_ownership(str(tmp_path), new)
    with pytest.raises(TakenOverError, match=r"generation 4\b.*generation 3\b"):
        publish_checkpoint(str(tmp_path), 1, [part], METADATA, author=old)
    with pytest.raises(TakenOverError):
        take_ownership(str(tmp_path), old)
    assert find_checkpoints(str(tmp_path)) == ()
    save(tmp_path, 1, author=new)
    # Another run is another job: it takes the folder over whatever its number, and the first one is told so.
    take_ownership(str(tmp_path), Author(0, "next"))
    part = put(tmp_path, 2, 0, author=new)
    with pytest.raises(TakenOverError, match="run next"):
        publish_checkpoint(str(tmp_path), 2, [part], METADATA, author=new)


OPERATIONS = ("open", "write", "pwrite", "fsync", "ftruncate", "rename", "mkdir")


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, at: int, code: int) -> Any:
    """The file system fails from the operation of this number on, as a full or broken disk does."""
    numbers = itertools.count()

    def failed(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            reads = call is opened and not args[1] & os.O_CREAT and not args[1] & os.O_DIRECTORY
            if not reads and next(numbers) >= at:
                raise OSError(code, os.strerror(code))
            return call(*args, **named)

        return counted

    opened = os.open
    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, failed(getattr(os, name)))
        patch.setattr(direct_io, "make_room", failed(direct_io.make_room))
        yield numbers


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_trouble_at_any_operation_is_an_outcome_and_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    save(tmp_path, 1)
    lane = WriteLane(str(tmp_path), print)

    def write(pulse: WritePulse) -> str:
        part = write_part(staging_folder(str(tmp_path), 2, ME), 0, [in_pages(content(5000, 1))], pulse=pulse)
        return publish_checkpoint(str(tmp_path), 2, [part], METADATA, author=ME, pulse=pulse)

    outcomes: list[WriteOutcome] = []
    for at in itertools.count():
        with failing(monkeypatch, at, code):
            outcomes.append(lane.run(2, write))
        found = find_checkpoints(str(tmp_path))
        assert [why for one in found for why in verify_checkpoint(one.url)] == []
        assert found[-1].step == 1
        if outcomes[-1].ok or found[0].step == 2:
            break
        assert outcomes[-1].detail.endswith(f": {os.strerror(code)}"), outcomes[-1]
        clean_unpublished(str(tmp_path), Author(2))
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert len(outcomes) > 15


def test_no_room_is_freed_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, block: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=os.strerror(errno.ENOSPC)):
        put(tmp_path, 1, 0, size=BLOCK_BYTES)
    [told] = Path(staging_folder(str(tmp_path), 1, ME)).iterdir()
    assert told.stat().st_size < 500
    # Whoever waits for it hears at once that it will not come.
    with pytest.raises(PartFailedError, match=os.strerror(errno.ENOSPC)):
        collect_parts(str(told.parent), 2, wait_s=600)


FULL = """
import sys
from pathlib import Path
from holdfast.checkpoint.write_lane import WriteLane
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.checkpoint_publication import publish_checkpoint, staging_folder, write_part
from holdfast.checkpoint.stored_checkpoints import (find_checkpoints)
from holdfast.checkpoint.checkpoint_reader import verify_checkpoint
base, lane = sys.argv[1], WriteLane(sys.argv[1], print)
def write(step, size):
    def go(pulse):
        part = write_part(staging_folder(base, step, Author(1)), 0, [memoryview(bytes(size))], pulse=pulse)
        return publish_checkpoint(base, step, [part], b"metadata", author=Author(1), pulse=pulse)
    return lane.run(step, go)
assert write(1, 3 << 20).ok
failed = write(2, 30 << 20)
assert not failed.ok and failed.detail.endswith("No space left on device"), failed
assert [one.step for one in find_checkpoints(base)] == [1] and verify_checkpoint(find_checkpoints(base)[0].url) == ()
assert write(3, 3 << 20).ok
print("survived")
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=16m none {tmp_path} && exec {sys.executable} -c '{FULL}' {tmp_path}"
    try:
        made = ["unshare", "--user", "--map-root-user", "--mount"]
        subprocess.run([*made, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no small file system can be mounted here: {e}")
    ran = subprocess.run([*made, "sh", "-c", mount], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.endswith("survived\n"), ran.stderr


def test_storage_that_hangs_publishes_nothing_when_it_wakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes, real = threading.Event(), os.pwrite

    def hanging(fd: int, block: memoryview, offset: int) -> int:
        wakes.wait(60)
        return real(fd, block, offset)

    memory = in_pages(content(2 * BLOCK_BYTES, 1))

    def write(pulse: WritePulse) -> str:
        part = write_part(staging_folder(str(tmp_path), 1, ME), 0, [memory], pulse=pulse)
        return publish_checkpoint(str(tmp_path), 1, [part], METADATA, author=ME, pulse=pulse)

    lane = WriteLane(str(tmp_path), print, stall_s=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", hanging)
        outcome = lane.run(1, write)
        assert not outcome.ok and "0.2 s" in outcome.detail
        memory[:] = bytes(len(memory))  # the slot is used again
        wakes.set()
        for thread in threading.enumerate():
            if thread.name == "holdfast-write-1":
                thread.join(30)
    assert find_checkpoints(str(tmp_path)) == ()
    assert lane.run(1, write).ok


def test_part_files_are_small_and_say_who_wrote(tmp_path: Path) -> None:
    part = put(tmp_path, 1, 0, size=3 * BLOCK_BYTES)
    path = Path(staging_folder(str(tmp_path), 1, ME), part.name)
    assert path.stat().st_size < 400
    shown = msgspec.json.decode(path.read_bytes())
    assert shown["writer"]["pid"] == os.getpid()
    assert len(shown["blocks"]) == 3 * 16


def test_others_follow_rank_0(tmp_path: Path) -> None:
    folder = staging_folder(str(tmp_path), 7, Author(1))
    assert not wait_until_begun(folder, wait_s=0.1)
    write_part(folder, 0, [memoryview(b"x" * 100)])
    assert wait_until_begun(folder, wait_s=0.1)
    given_up = WritePulse()
    given_up.give_up()
    with pytest.raises(WriteGivenUpError):
        wait_until_begun(staging_folder(str(tmp_path), 8, Author(1)), given_up, wait_s=10.0)


def test_nobody_waits_for_rank_0_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Nor holds its snapshot as long, for which there are few slots."""
    (tmp_path / "file").touch()
    pulse, began_at = WritePulse(), time.monotonic()
    assert not wait_until_begun(staging_folder(str(tmp_path / "file" / "ckpt"), 7, Author(1)), pulse, wait_s=600.0)
    assert pulse.left_out and time.monotonic() - began_at < 300
    assert not wait_until_begun(staging_folder(str(tmp_path / "ckpt"), 7, Author(1)), wait_s=1.5)
    assert list((tmp_path / "ckpt").iterdir()) == [], "what was tried is gone"


def test_who_waits_for_rank_0_takes_a_later_step_instead(tmp_path: Path) -> None:
    lane = WriteLane(str(tmp_path), print)

    def follow(step: int) -> Callable[[WritePulse], str]:
        def write(pulse: WritePulse) -> str:
            folder = staging_folder(str(tmp_path), step, Author(1))
            if wait_until_begun(folder, pulse, wait_s=60.0):
                write_part(folder, 1, [memoryview(b"y" * 100)], pulse=pulse)
            return ""

        return write

    first: list[WriteOutcome] = []
    thread = threading.Thread(target=lambda: first.append(lane.run(7, follow(7))))
    thread.start()
    while not lane._pulse.waiting:
        time.sleep(0.01)
    write_part(staging_folder(str(tmp_path), 8, Author(1)), 0, [memoryview(b"x" * 100)])
    assert lane.run(8, follow(8)).bytes == 100
    thread.join(30)
    assert first[0].ok and first[0].bytes == 0, "step 7 was left out"
    assert len(collect_parts(staging_folder(str(tmp_path), 8, Author(1)), 2, 0.1)) == 2


def test_storage_that_had_stopped_gives_rank_0_its_time_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_publication, "_SLOW_S", 0.2)
    folder, pulse, answers = staging_folder(str(tmp_path), 7, Author(1)), WritePulse(), threading.Event()
    look, looks = checkpoint_publication._read_part, list[int]()

    def stopped(storage: Storage, rank: int) -> CheckpointPart | None:
        looks.append(rank)
        if len(looks) == 1:
            answers.wait(30)
            return None  # rank 0 was held up as well
        return look(storage, rank)

    monkeypatch.setattr(checkpoint_publication, "_read_part", stopped)
    followed: list[bool] = []
    thread = threading.Thread(target=lambda: followed.append(wait_until_begun(folder, pulse, wait_s=5.0)))
    thread.start()
    time.sleep(0.3)
    pulse.passed_over = True  # a later step was due meanwhile, and was left out
    answers.set()
    time.sleep(0.15)
    write_part(folder, 0, [memoryview(b"x" * 100)])
    thread.join(30)
    assert followed == [True] and not pulse.left_out
