"""States on a node's local disk: written from floors, found after all memory is lost, and never believed unchecked."""

import asyncio
import errno
import os
import resource
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from holdfast.agent.snapshots.arena_table import SnapshotPin
from holdfast.agent.snapshots.snapshot_disk import PacedPulse, SnapshotDisk
from holdfast.checkpoint.disk_state_record import DiskState
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.storage_errors import WriteGivenUpError
from holdfast.checkpoint.write_lane import WritePulse
from holdfast.core.snapshots.disk_floor_coordination import DiskLimits
from holdfast.core.snapshots.lineage import Line, add_launch
from holdfast.model.job_and_seats import Seat
from holdfast.model.restore_sources import LaunchOrigin, Restore
from holdfast.wire.rank_keeper_messages import KeeperRefusal, StateGrant, StateRequest
from tests.agent.peers import Fleet, Trained, image, until

_LIMITS = DiskLimits()


class Disked(Trained):
    """Three ranks on as many nodes, each with a disk of its own."""

    def __init__(self, fleet: Fleet, limits: DiskLimits = _LIMITS) -> None:
        super().__init__(fleet)
        self.root = fleet.folder / "disks"
        fleet.disk = msgspec.structs.replace(limits, path=str(self.root))

    async def write(self, step: int, floor: int = -1, disk_from: int = -1) -> None:
        """Make this step the floor, and have every node write it."""
        await self.back_up(step, floor)
        await self.aim_at_disk(step, disk_from)

    async def aim_at_disk(self, step: int, disk_from: int = -1) -> None:
        for name in self.names:
            keeper = self.fleet.nodes[name].keeper
            aim = msgspec.structs.replace(keeper.backing.aim, disk=step, disk_from=disk_from)
            await keeper.apply_aim(aim)

    async def lose_memory(self) -> None:
        for name in self.names:
            await self.fleet.reboot(name)

    def states(self, name: str) -> list[int]:
        return sorted(copy.step for copy in self.fleet.copies(name) if copy.disk)

    def file(self, name: str, rank: int, step: int, what: str = "__0_0.distcp") -> Path:
        return self.root / name / "r." / f"rank-{rank}" / f"step-{step:08d}" / what

    def written(self) -> list[tuple[int, int]]:
        keepers = [self.fleet.nodes[name].keeper for name in self.names]
        return [(keeper.disk.written, keeper.disk.tried) for keeper in keepers]

    async def resume(
        self, *names: str, generation: int = 2, line: Line = ()
    ) -> tuple[Restore, list[StateGrant | KeeperRefusal]]:
        """Launch a generation on these nodes, from what all nodes hold, and ask for every rank's state."""
        self.fleet.seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(names))
        plan = self.fleet.plan(*self.names, line=line)
        origin = LaunchOrigin(generation=generation, step=plan.step, maker=plan.maker)
        self.fleet.launch(generation, *names, restore=plan, line=add_launch(line, origin) if line else ())
        answers = []
        for rank, name in enumerate(names):
            node = self.fleet.nodes[name]
            answer = await node.ask(StateRequest(rank=rank, generation=generation))
            assert isinstance(answer, StateGrant | KeeperRefusal)
            answers.append(answer)
        return plan, answers


@pytest.mark.parametrize("names", ["abc", "bca"])
async def test_a_state_outlives_all_memory_and_is_read_from_the_own_or_another_disk(fleet: Fleet, names: str) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    expected = [image(arena, plan, 5) for arena, plan in zip(job.arenas, job.plans, strict=True)]
    await job.write(9, floor=5)
    assert job.written() == [(9, 9)] * 3
    job.save(10, 11)
    expected = [image(arena, plan, 9) for arena, plan in zip(job.arenas, job.plans, strict=True)]
    await job.lose_memory()
    plan, answers = await job.resume(*names)
    assert plan.step == 9 and [source.own for source in plan.sources] == [
        name == "abc"[i] for i, name in enumerate(names)
    ]
    assert plan.reason == "restoring step 9: 3 from local disks"
    assert [(one.source, one.step) for one in answers if isinstance(one, StateGrant)] == [("disk", 9)] * 3
    arenas = [await fleet.nodes[name].arena(layout, 2) for name, layout in zip(names, job.plans, strict=True)]
    assert [image(arena, layout, 9) for arena, layout in zip(arenas, job.plans, strict=True)] == expected


@pytest.mark.parametrize("names", ["abc", "bca"])
@pytest.mark.parametrize("told", [1, 2])
async def test_of_two_states_of_a_step_that_of_the_line_is_read_and_keeps_its_name(
    fleet: Fleet, names: str, told: int
) -> None:
    """Generation 2 takes up nothing and makes step 5 again, in its own way."""
    job, images = Disked(fleet), {}
    await job.start()
    for generation in (1, 2):
        if generation == 2:
            await job.launch(2)
        await job.write(5)
        images[generation] = [image(arena, plan, 5) for arena, plan in zip(job.arenas, job.plans, strict=True)]
    await job.lose_memory()
    assert [job.states(name) for name in "abc"] == [[5, 5]] * 3 and images[1] != images[2]
    line = tuple(LaunchOrigin(generation=number, stepped=number == told) for number in (1, 2))
    plan, answers = await job.resume(*names, generation=3, line=line)
    assert plan.maker == told and [one.source for one in answers if isinstance(one, StateGrant)] == ["disk"] * 3
    arenas = [await fleet.nodes[name].arena(layout, 3) for name, layout in zip(names, job.plans, strict=True)]
    got = [image(arena, layout, 5) for arena, layout in zip(arenas, job.plans, strict=True)]
    assert [[made for made in images if images[made][rank] == one] for rank, one in enumerate(got)] == [[told]] * 3
    assert {one.generation for arena in arenas for one in arena.list_sealed()} == {told}


async def test_a_cut_state_is_left_out_and_the_older_one_is_used(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    await job.write(9, floor=5)
    path = job.file("b", 1, 9)
    path.write_bytes(path.read_bytes()[:-1])
    await job.lose_memory()
    plan, answers = await job.resume(*"abc")
    assert plan.step == 5 and all(isinstance(one, StateGrant) for one in answers)
    assert [job.states(name) for name in "abc"] == [[5], [5], [5]], "of step 9 the job has left the line"
    told = [said for said in fleet.nodes["b"].said if "left out" in said]
    assert len(told) == 1 and "step-00000009" in told[0]


@pytest.mark.parametrize("what", ["__0_0.distcp", "__0_0.json", ".metadata"])
async def test_a_flipped_byte_is_refused_and_the_older_state_is_used(fleet: Fleet, what: str) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    await job.write(9, floor=5)
    path = job.file("b", 1, 9, what)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    await job.lose_memory()
    if what != ".metadata":
        plan, answers = await job.resume(*"abc")
        assert plan.step == 9 and [isinstance(one, StateGrant) for one in answers] == [True, False, True]
        assert any(f" rank 1 at {path.parent}: " in said for said in fleet.nodes["b"].said)
    assert job.states("b") == [5], "nobody is offered it again"


async def test_only_this_run_in_a_folder_of_its_owner_counts(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    await job.lose_memory()
    keeper = fleet.nodes["a"].keeper
    assert job.states("a") == [5]
    await keeper.use_run("r.other")
    assert job.states("a") == []
    (job.root / "a" / "r.").rename(job.root / "a" / "r.other")
    assert job.states("a") == [] and "of run r." in fleet.nodes["a"].said[-1], "its manifest tells"
    folder = job.root / "b" / "r."
    folder.chmod(0o755)
    assert job.states("b") == [] and str(folder) in fleet.nodes["b"].said[-1]
    folder.chmod(0o700)
    assert job.states("b") == [5]


async def test_a_full_disk_is_said_once_and_costs_nothing_but_newer_states(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        await job.write(9, floor=5)
        await job.write(13, floor=9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert job.written() == [(5, 13)] * 3 and job.states("a") == [5]
    [said] = fleet.nodes["a"].said
    assert said.startswith("step 9 ") and os.strerror(errno.EFBIG) in said
    await job.write(17, floor=13)
    assert job.written() == [(17, 17)] * 3 and job.states("a") == [5, 17]
    assert [text.split()[:2] for text in fleet.nodes["a"].said[1:]] == [["step", "17"]], "that it is over"


async def test_no_more_is_written_than_disk_max_bytes_allows(fleet: Fleet) -> None:
    job = Disked(fleet, DiskLimits(max_bytes=5_000_000))  # an image has 3 MB
    await job.start()
    await job.write(5)
    await job.write(9, floor=5)
    assert job.written() == [(5, 9)] * 3
    assert "disk.max_bytes allows 5000000" in fleet.nodes["a"].said[-1]


async def test_older_states_go_when_every_disk_has_later_ones(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    await job.write(9, floor=5)
    await job.write(13, floor=9, disk_from=9)
    assert [job.states(name) for name in "abc"] == [[9, 13]] * 3


async def test_states_of_a_line_that_the_job_leaves_go_at_the_launch(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    await job.write(9, floor=5)
    plan = msgspec.structs.replace(fleet.plan(*"abc"), step=5)
    fleet.launch(2, *"abc", restore=plan)
    await until(lambda: [job.states(name) for name in "abc"] == [[5]] * 3)


async def test_a_launch_without_sources_removes_nothing(fleet: Fleet) -> None:
    """It may fail, and then there is nothing else."""
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    fleet.launch(2, *"abc", restore=Restore())
    await until(lambda: all(thread.name != "holdfast-remove" for thread in threading.enumerate()))
    assert [job.states(name) for name in "abc"] == [[5]] * 3


async def test_an_aim_of_a_generation_that_is_over_is_not_followed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one begins while old states are being removed."""
    job = Disked(fleet)
    await job.start()
    await job.back_up(5)
    keeper, loop = fleet.nodes["a"].keeper, asyncio.get_running_loop()

    def remove_late(disk: SnapshotDisk, step: int) -> None:
        future = asyncio.run_coroutine_threadsafe(relaunch(), loop)
        future.result(60)

    async def relaunch() -> None:
        fleet.launch(2, *"abc", restore=fleet.plan(*"abc"))

    monkeypatch.setattr(SnapshotDisk, "remove_before", remove_late)
    await keeper.apply_aim(msgspec.structs.replace(keeper.backing.aim, disk=5, disk_from=3))
    assert (keeper.disk.written, keeper.disk.tried) == (-1, -1) and job.states("a") == []


async def test_a_disk_that_hangs_costs_the_agent_one_short_wait(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    assert job.states("a") == [5]
    over, looks, look = threading.Event(), [0], SnapshotDisk.list_states

    def look_late(disk: SnapshotDisk) -> list[DiskState]:
        looks[0] += 1
        over.wait(60)
        return look(disk)

    monkeypatch.setattr("holdfast.agent.snapshots.snapshot_disk._LOOK_S", 0.2)
    monkeypatch.setattr(SnapshotDisk, "list_states", look_late)
    for _ in range(50):
        assert job.states("a") == [5], "as far as anybody knows"
    assert looks == [1]
    (job.root / "a" / "r." / "rank-0" / "step-00000005").rename(job.root / "elsewhere")
    over.set()
    await until(lambda: job.states("a") == [])


async def test_what_takes_the_place_of_a_damaged_state_is_read(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    path = job.file("a", 0, 5)
    whole = path.parent.with_name("whole")
    shutil.copytree(path.parent, whole)
    path.write_bytes(b"cut")
    await job.lose_memory()
    assert job.states("a") == []
    shutil.rmtree(path.parent)
    whole.rename(path.parent)
    os.utime(path.parent)
    assert job.states("a") == [5]


async def test_a_write_of_a_generation_that_is_over_counts_for_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Disked(fleet)
    await job.start()
    begun, over = threading.Event(), threading.Event()
    write = SnapshotDisk.write_state

    def write_late(disk: SnapshotDisk, author: Author, pin: SnapshotPin, verified: bool, pulse: WritePulse) -> None:
        begun.set()
        over.wait(60)
        write(disk, author, pin, verified, pulse)

    monkeypatch.setattr(SnapshotDisk, "write_state", write_late)
    await job.back_up(5)
    writing = asyncio.create_task(job.aim_at_disk(5))
    await until(begun.is_set)
    fleet.launch(2, *"abc", restore=fleet.plan(*"abc"))
    over.set()
    await writing
    assert job.written() == [(-1, -1)] * 3 and job.states("a") == [] and fleet.nodes["a"].said == []


async def test_a_disk_that_takes_nothing_is_said_before_the_first_write(fleet: Fleet) -> None:
    job = Disked(fleet)
    job.root.write_text("a file in its place")
    await job.start()
    await until(lambda: all(fleet.nodes[name].said for name in "abc"))
    await job.write(5)
    assert job.written() == [(-1, 5)] * 3
    [said] = fleet.nodes["a"].said
    assert str(job.root) in said


def test_a_write_rests_as_long_as_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    times = iter([0.0, 2.0, 2.0, 2.5, 2.5, 2.5])
    clock = SimpleNamespace(monotonic=times.__next__, wall=times.__next__)
    monkeypatch.setattr("holdfast.agent.snapshots.snapshot_disk.time.sleep", slept.append)
    pulse = WritePulse()
    paced = PacedPulse(pulse, clock)
    for count in (8, 8, 0):
        paced.add_bytes(count)
    assert slept == [1.0, 0.5] and pulse.bytes == 16, "for a second at most"
    pulse.give_up()
    with pytest.raises(WriteGivenUpError):
        paced.add_bytes()
