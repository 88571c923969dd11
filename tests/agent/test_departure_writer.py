"""What a keeper writes to storage before its node leaves."""

import asyncio
import os
import re
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.snapshots import checkpoint_writer, departure_writer
from holdfast.checkpoint import checkpoint_publication, checkpoint_reader, stored_checkpoints
from holdfast.checkpoint.arena import STORED, Arena
from holdfast.checkpoint.manifest import Author, CheckpointPart
from holdfast.checkpoint.write_lane import WritePulse
from holdfast.core.snapshots.memory_grant import format_bytes
from holdfast.model.node_errands import FinalState, Leave
from holdfast.model.restore_sources import Restore
from holdfast.model.state_doubt import Doubt
from holdfast.model.stored_checkpoint_report import MissedCheckpoint
from holdfast.wire.rank_keeper_messages import CheckpointPolicy
from tests.agent.test_keeper import IMAGE_BYTES, Bench, bench, from_own_memory, launch, snapshot, until, want

__all__ = ["bench"]


def last(step: int, *, doubted: bool = False) -> tuple[FinalState, ...]:
    return (FinalState(step=step, ranks=(0,), doubted=doubted),)


class Stored:
    """A rank that writes checkpoints seldom, and the path where they go."""

    def __init__(self, bench: Bench, folder: Path, every: int = 1000) -> None:
        (folder / "metadata").write_bytes(b"blob")
        self.keeper, self.said = bench.keeper, bench.said
        self.storage = CheckpointPolicy(url=str(folder / "ckpt"), every_steps=every, keep=1)
        self.metadata = str(folder / "metadata")
        self._bench = bench

    async def arena(self, generation: int = 1) -> Arena:
        self.keeper.begin_launch(launch(generation))
        return await self._bench.arena(want(generation, self.storage, self.metadata))

    @property
    def missed(self) -> MissedCheckpoint | None:
        return self.keeper._persisting.missed_checkpoint

    def steps(self, below: str = "") -> list[int]:
        return [found.step for found in stored_checkpoints.find_checkpoints(self.storage.url + below)]


@pytest.fixture
def stored(bench: Bench, tmp_path: Path) -> Stored:
    return Stored(bench, tmp_path)


async def test_the_last_step_goes_to_storage(stored: Stored) -> None:
    content = snapshot(await stored.arena(), 125)
    await stored.keeper.parting.write_last(last(125), 30)
    [found] = stored_checkpoints.find_checkpoints(stored.storage.url)
    into = bytearray(IMAGE_BYTES)
    checkpoint_reader.read_part(found.url, 0, memoryview(into))
    assert found.step == 125 and bytes(into) == content
    assert stored.said[0] == f"writing step 125 to {stored.storage.url} before the job ends, for 30 s at most"
    assert stored.said[1].startswith(f"step 125 was written to {found.url} in ")


async def test_a_write_that_takes_long_is_told_now_and_then(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes one page in a while."""
    monkeypatch.setattr(departure_writer, "_TELL_S", 0.2)
    plain = checkpoint_publication.write_part

    def write_slowly(folder: str, rank: int, ranges: Sequence[memoryview], *, pulse: WritePulse) -> CheckpointPart:
        for _ in range(IMAGE_BYTES // 4096):
            time.sleep(0.5)
            pulse.add_bytes(4096)
        return plain(folder, rank, ranges)

    monkeypatch.setattr(checkpoint_publication, "write_part", write_slowly)
    snapshot(await stored.arena(), 125)
    await stored.keeper.parting.write_last(last(125), 30)
    began, *progress, done = stored.said
    assert began.startswith("writing step 125 to ") and done.startswith("step 125 was written to ")
    form = rf"writing step 125 to {stored.storage.url}: (\S+ \S+) of {format_bytes(IMAGE_BYTES)} of rank 0 after \d s"
    told = [re.fullmatch(form, line) for line in progress]
    assert len(told) > 2 and all(told), progress
    assert [one[1] for one in told if one][:1] == ["0 bytes"] and len({one[1] for one in told if one}) > 2, "it grows"
    assert stored.steps() == [125]


async def test_a_write_that_waits_for_other_ranks_says_so(bench: Bench, tmp_path: Path) -> None:
    stored = Stored(bench, tmp_path)
    stored.keeper.begin_launch(launch(1))
    arena = await bench.arena(msgspec.structs.replace(want(1, stored.storage, stored.metadata), world=2, slots=3))
    snapshot(arena, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(departure_writer, "_TELL_S", 0.5)
        await stored.keeper.parting.write_last(last(7), 2.0)
    of = f"all {format_bytes(IMAGE_BYTES)} of rank 0, waiting for the other ranks' parts"
    form = rf"writing step 7 to {stored.storage.url}: {of}, after \d s"
    assert any(re.fullmatch(form, line) for line in stored.said), stored.said


async def test_a_rank_that_had_no_time_to_ask_for_its_memory(stored: Stored) -> None:
    """A generation that is ended before its ranks are up holds what the one before it has left."""
    snapshot(await stored.arena(), 7)
    stored.keeper.begin_launch(launch(2, from_own_memory(7)))
    await stored.keeper.parting.write_last(last(7), 30)
    assert stored.steps() == [7]


async def test_state_in_doubt_is_written_apart_and_retires_nothing(stored: Stored) -> None:
    arena = await stored.arena()
    snapshot(arena, 40)
    snapshot(arena, 41)
    await stored.keeper.parting.write_last((*last(40), *last(41, doubted=True)), 30)
    assert stored.steps() == [40] and stored.steps("/doubted") == [41]
    assert f"{stored.storage.url}/doubted/" in stored.said[-1]


async def test_what_goes_on_from_a_folder_of_doubted_states_counts_like_any_other(stored: Stored) -> None:
    stored.storage = msgspec.structs.replace(stored.storage, url=f"{stored.storage.url}/doubted")
    snapshot(await stored.arena(), 7)
    await stored.keeper.parting.write_last(last(7), 30)
    assert stored.steps() == [7] and stored.keeper.stored == 7


async def test_checkpoints_in_doubt_are_marked_at_the_end_and_at_the_next_launch(bench: Bench, tmp_path: Path) -> None:
    stored = Stored(bench, tmp_path, every=10)
    stored.storage = msgspec.structs.replace(stored.storage, keep=5)
    arena = await stored.arena()

    def sound() -> list[int]:
        return [found.step for found in stored_checkpoints.find_checkpoints(stored.storage.url) if found.ok]

    for step in (10, 20):
        snapshot(arena, step)
        await until(lambda: stored.keeper.stored == step)  # noqa: B023 - it is called at once
    restore = Restore(step=9, doubts=(Doubt(generation=1, not_after=15),))
    stored.keeper.begin_launch(launch(2, restore))
    await until(lambda: sound() == [10])
    arena = await bench.arena(want(2, stored.storage, stored.metadata))
    snapshot(arena, 20, generation=2)
    await until(lambda: stored.keeper.stored == 20)
    assert sound() == [20, 10]
    leave = Leave(id=1, code=93, grace_s=0.0, reason="it is nan", ended=True)
    await stored.keeper.leave_job(msgspec.structs.replace(leave, doubts=(Doubt(generation=2, not_after=5),)))
    assert sound() == [] and "step 10, 20" in stored.said[-1]


async def test_what_a_full_disk_leaves_goes_with_the_next_write(bench: Bench, tmp_path: Path) -> None:
    stored = Stored(bench, tmp_path, every=10)
    arena = await stored.arena()
    other = staged(stored.storage.url, 5, Author(1, "other"))  # of a run that lives

    def left() -> set[str]:
        return {name for name in os.listdir(stored.storage.url) if name.startswith(".step-")}

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (IMAGE_BYTES // 2, limits[1]))
    try:
        for step in (10, 20):
            snapshot(arena, step)
            await until(lambda: stored.missed and stored.missed.step == step)  # noqa: B023
            assert left() == {other, f".step-{step:08d}.tmp-r.-1"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    snapshot(arena, 30)
    await until(lambda: stored.keeper.stored == 30)
    await until(lambda: left() == {other})


def staged(url: str, step: int, author: Author) -> str:
    """Begin a write, in the name of another; return its folder's name."""
    folder = checkpoint_publication.staging_folder(url, step, author)
    checkpoint_publication.write_part(folder, 0, [memoryview(b"some")])
    return os.path.basename(folder)


async def test_what_a_full_disk_leaves_goes_at_the_end(stored: Stored) -> None:
    snapshot(await stored.arena(), 7)
    other = staged(stored.storage.url, 5, Author(1, "other"))  # of a run that lives
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (IMAGE_BYTES // 2, limits[1]))
    try:
        await stored.keeper.leave_job(
            Leave(id=1, code=0, grace_s=0.0, reason="enough", ended=True, last=last(7), last_s=30.0)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert stored.missed and stored.missed.step == 7
    assert [name for name in os.listdir(stored.storage.url) if name.startswith(".step-")] == [os.path.basename(other)]


async def test_what_a_launch_missed_is_not_told_of_the_next_one_and_goes_at_the_end(stored: Stored) -> None:
    snapshot(await stored.arena(), 7)
    staged(stored.storage.url, 7, Author(1, "r."))
    stored.keeper._persisting.note_missed(0, 7, "step 7 is left out")
    await stored.arena(2)
    assert stored.missed is None
    await stored.keeper.leave_job(Leave(id=1, code=0, grace_s=0.0, reason="enough", ended=True))
    assert not [name for name in os.listdir(stored.storage.url) if name.startswith(".step-")]


async def test_what_came_from_storage_is_not_written_there_again(stored: Stored) -> None:
    arena = await stored.arena()
    slot = arena.begin_slot(9, 0, STORED)
    assert slot
    slot.seal()
    await stored.keeper.parting.write_last(last(9), 30)
    assert stored.steps() == [] and stored.said == []


async def test_without_storage_nothing_is_said(bench: Bench) -> None:
    bench.keeper.begin_launch(launch(1))
    snapshot(await bench.arena(want(1)), 3)
    await bench.keeper.parting.write_last(last(3), 30)
    assert bench.said == []


async def test_a_damaged_snapshot_does_not_become_a_checkpoint(stored: Stored) -> None:
    arena = await stored.arena()
    snapshot(arena, 7)
    [one] = arena.list_sealed()
    arena.write_checksums(one.slot)
    arena.slot_image(one.slot)[5000] ^= 1
    await stored.keeper.parting.write_last(last(7), 30)
    assert stored.steps() == [] and "block 0" in stored.said[-1]


async def test_a_final_step_that_is_not_written_is_told_until_one_is(stored: Stored) -> None:
    snapshot(await stored.arena(), 7)
    os.mkfifo(stored.storage.url)  # where a folder should be
    await stored.keeper.parting.write_last(last(7, doubted=True), 30)
    before = stored.missed
    await stored.keeper.parting.write_last(last(7), 30)
    missed = stored.missed
    assert before is None, "a state in doubt is nobody's final state"
    assert stored.keeper.stored == -1 and missed and missed.step == 7 and stored.storage.url in missed.why
    os.unlink(stored.storage.url)
    await stored.keeper.parting.write_last(last(7), 30)
    assert (stored.keeper.stored, stored.missed) == (7, None)


async def test_a_step_that_was_left_out_stays_missed_when_the_one_before_it_is_written(stored: Stored) -> None:
    snapshot(await stored.arena(), 7)
    stored.keeper._persisting.note_missed(0, 9, "step 9 is left out")
    await stored.keeper.parting.write_last(last(7), 30)
    assert stored.keeper.stored == 7 and stored.missed == MissedCheckpoint(step=9, why="step 9 is left out")


async def test_of_missed_steps_the_latest_is_told(stored: Stored) -> None:
    """A write that is left out is told at once, and the one that holds it up only when that has failed."""
    await stored.arena()
    stored.keeper._persisting.note_missed(0, 9, "step 9 is left out")
    stored.keeper._persisting.note_missed(0, 7, "step 7 was given up")
    assert stored.missed == MissedCheckpoint(step=9, why="step 9 is left out")


@pytest.mark.usefixtures("hanging_storage")
async def test_storage_that_hangs_does_not_hold_up_the_end(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "_STALL_S", 3.0)  # a thread waits it out when all else is over
    arena = await stored.arena()
    snapshot(arena, 7)
    began_at = time.monotonic()
    await stored.keeper.parting.write_last(last(7), 1.0)
    assert time.monotonic() - began_at < 10
    assert stored.said[-1] == f"step 7 was not written to {stored.storage.url} within 1 s"
    assert stored.missed == MissedCheckpoint(step=7, why=stored.said[-1])


async def test_a_later_step_that_others_lack_is_given_up_for_the_last(bench: Bench, tmp_path: Path) -> None:
    """Rank 0 has begun to write step 8 and waits for rank 1, which was killed before it had one."""
    stored = Stored(bench, tmp_path, every=8)
    stored.keeper.begin_launch(launch(1))
    two = msgspec.structs.replace(want(1, stored.storage, stored.metadata), world=2, slots=3)
    arena = await bench.arena(two)
    snapshot(arena, 7)
    snapshot(arena, 8)
    await until(lambda: (0, 8) in stored.keeper._persisting.under_way)
    writing = asyncio.create_task(stored.keeper.parting.write_last(last(7), 30))
    folder = checkpoint_publication.staging_folder(stored.storage.url, 7, Author(1, "r."))
    assert await asyncio.to_thread(checkpoint_publication.wait_until_begun, folder, None, 20.0)
    await asyncio.to_thread(checkpoint_publication.write_part, folder, 1, [memoryview(b"rank 1's")])
    await writing
    assert stored.steps() == [7]
