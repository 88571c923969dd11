"""States on a node's local disk: written from floors, found after all memory is lost, and never believed unchecked."""

import asyncio
import os
import resource
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.agent.snapshots.arena_table import SnapshotPin
from holdfast.agent.snapshots.snapshot_disk import PacedPulse, SnapshotDisk
from holdfast.checkpoint import checkpoint_save, retention
from holdfast.checkpoint.manifest import Author, WriteGivenUpError, part_name
from holdfast.checkpoint.write_lane import WritePulse
from holdfast.core.snapshots.disk_floor import DiskLimits
from holdfast.model.errand import FinalState, Leave
from holdfast.model.job_and_seats import Seat
from holdfast.model.state_copy import Doubt, Restore
from holdfast.wire.rank_keeper_messages import CheckpointPolicy, KeeperRefusal, StateGrant, StateRequest
from tests.agent.peers import Fleet, Trained, image, until

LEAVE = Leave(id=9, code=0, grace_s=0.0, reason="the job has ended", ended=True)


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

    async def resume(self, *names: str, generation: int = 2) -> tuple[Restore, list[StateGrant | KeeperRefusal]]:
        """Launch a generation on these nodes, from what all nodes hold, and ask for every rank's state."""
        self.fleet.seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(names))
        plan = self.fleet.plan(*self.names)
        self.fleet.launch(generation, *names, restore=plan)
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
        assert "dropped the damaged state of rank 1" in " ".join(fleet.nodes["b"].said)
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
    assert job.states("b") == [] and "other users may read or write it" in fleet.nodes["b"].said[-1]
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
    said = [text for text in fleet.nodes["a"].said if "disk" in text]
    assert len(said) == 1 and "step 9 was not written" in said[0] and "training goes on" in said[0]
    await job.write(17, floor=13)
    assert job.written() == [(17, 17)] * 3 and job.states("a") == [5, 17]
    assert "states are written to disk again" in fleet.nodes["a"].said[-1]


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
    over, look = threading.Event(), SnapshotDisk._look_at_states
    monkeypatch.setattr("holdfast.agent.snapshots.snapshot_disk._LOOK_S", 0.2)
    monkeypatch.setattr(SnapshotDisk, "_look_at_states", lambda disk: over.wait(60) and look(disk))
    for _ in range(50):
        assert job.states("a") == []
    assert len(fleet.nodes["a"].said) == 1 and "does not answer" in fleet.nodes["a"].said[0]
    over.set()
    monkeypatch.undo()
    await until(lambda: job.states("a") == [5])


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


async def test_the_final_state_stays_where_no_storage_has_it(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    job.save(8)
    for rank, name in enumerate("abc"):
        last = (FinalState(step=8, ranks=(rank,)),)
        await fleet.nodes[name].keeper.leave_job(msgspec.structs.replace(LEAVE, last=last, last_s=60.0))
        folder = job.root / name / "r."
        assert job.states(name) == [5, 8]
        assert fleet.nodes[name].said[-1] == f"step 8 stays on disk in {folder}: no storage has this state"


async def test_the_final_state_waits_for_a_write_that_is_given_up(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Disked(fleet)
    await job.start()
    begun, write = threading.Event(), SnapshotDisk.write_state

    def write_late(disk: SnapshotDisk, author: Author, pin: SnapshotPin, verified: bool, pulse: WritePulse) -> None:
        if pin.step == 5:
            begun.set()
            time.sleep(0.5)
        write(disk, author, pin, verified, pulse)

    monkeypatch.setattr(SnapshotDisk, "write_state", write_late)
    await job.back_up(5)
    keeper = fleet.nodes["a"].keeper
    writing = asyncio.create_task(keeper.apply_aim(msgspec.structs.replace(keeper.backing.aim, disk=5)))
    await until(begun.is_set)
    job.save(8)
    last = (FinalState(step=8, ranks=(0,)),)
    await keeper.leave_job(msgspec.structs.replace(LEAVE, last=last, last_s=60.0))
    await writing
    assert job.states("a") == [8]
    assert fleet.nodes["a"].said == [f"step 8 stays on disk in {job.root / 'a' / 'r.'}: no storage has this state"]


def give_storage(job: Disked, *ranks: int) -> str:
    """Let keepers know a storage for these ranks, as if their scripts had named one; return its path."""
    url, metadata = str(job.fleet.folder / "ckpt"), job.fleet.folder / "metadata"
    metadata.write_bytes(b"blob")
    for rank in ranks:
        persisting = job.fleet.nodes[job.names[rank]].keeper._persisting
        policy = CheckpointPolicy(url=url, every_steps=100)
        want = msgspec.structs.replace(persisting._latest[rank], storage=policy, metadata_path=str(metadata))
        persisting.note_request(want)
    return url


async def end_at(job: Disked, step: int, last_s: float, **more: Any) -> None:
    """All nodes leave at the end of the job, whose final state is this one."""
    leave = msgspec.structs.replace(LEAVE, last_s=last_s, **more)
    lasts = [(name, (FinalState(step=step, ranks=(rank,)),)) for rank, name in enumerate(job.names)]
    keepers = [(job.fleet.nodes[name].keeper, msgspec.structs.replace(leave, last=last)) for name, last in lasts]
    await asyncio.gather(*(keeper.leave_job(one) for keeper, one in keepers))


async def test_a_final_state_on_storage_is_told_once_and_leaves_nothing_on_disk(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    job.save(8)
    url = give_storage(job, 0, 1, 2)
    await end_at(job, 8, 60.0)
    assert [one.step for one in retention.find_checkpoints(url)] == [8]
    assert not any((job.root / name / "r.").exists() for name in "abc")
    told = [said.split(" in ")[0] for name in "abc" for said in fleet.nodes[name].said]
    assert told == [
        f"writing step 8 to {url} before the job ends, for 60 s at most",
        f"step 8 was written to {url}/step-00000008",
    ]


async def test_a_final_state_that_rank_0_cannot_publish_stays_on_all_disks(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    job.save(8)
    url = give_storage(job, 0, 1, 2)
    (fleet.folder / "metadata").unlink()
    await end_at(job, 8, 6.0)
    assert retention.find_checkpoints(url) == ()
    assert [job.states(name) for name in "abc"] == [[5, 8]] * 3
    for name in "abc":
        stays = f"step 8 stays on disk in {job.root / name / 'r.'}: no storage has this state"
        assert fleet.nodes[name].said[-1] == stays


async def test_a_published_step_of_another_generation_or_in_doubt_is_not_the_final_one(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    job.save(8)
    url = give_storage(job, 0, 1, 2)
    await end_at(job, 8, 60.0)
    b = fleet.nodes["b"].keeper._persisting
    assert b.is_published(1, 8)
    retention.mark_doubts(url, "r.", (Doubt(generation=1, not_after=7),))
    assert not b.is_published(1, 8)
    (fleet.folder / "ckpt" / ".holdfast-doubts.json").unlink()
    b._author = Author(2, "r.")
    assert not b.is_published(1, 8)


async def test_a_good_state_stays_when_all_that_storage_has_after_it_is_in_doubt(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    await job.write(9, floor=5)
    give_storage(job, 0, 1, 2)
    a = fleet.nodes["a"].keeper
    a._persisting.stored = 9
    doubts = (Doubt(generation=1, not_after=7),)
    await a.leave_job(msgspec.structs.replace(LEAVE, stored=4, doubts=doubts))
    assert job.states("a") == [5, 9] and fleet.nodes["a"].said[-1].startswith("step 5 stays on disk in ")
    await a.leave_job(msgspec.structs.replace(LEAVE, stored=5, doubts=doubts))
    assert job.states("a") == [5, 9] and fleet.nodes["a"].said[-1].startswith("step 9 (in doubt) stays on disk in ")


async def test_a_host_that_came_back_and_got_no_launch_says_what_lies_on_its_disk(fleet: Fleet) -> None:
    """After a loss of power the job gives up before its next launch."""
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    await job.lose_memory()
    keeper = fleet.nodes["a"].keeper
    for stored in (4, 5):
        await keeper.leave_job(msgspec.structs.replace(LEAVE, code=93, stored=stored))
        assert job.states("a") == [5] * (stored == 4)
    assert fleet.nodes["a"].said == [f"step 5 stays on disk in {job.root / 'a' / 'r.'}: no storage has this state"]


async def test_the_final_state_goes_to_disk_in_time_when_storage_hangs(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    job.save(8)
    url = give_storage(job, 0)
    folder = checkpoint_save.staging_folder(url, 8, Author(1, "r."))
    os.makedirs(folder)
    os.mkfifo(fifo := f"{folder}/{part_name(0)}")  # whoever opens it waits for a writer
    last = (FinalState(step=8, ranks=(0,)),)
    leaving = asyncio.create_task(
        fleet.nodes["a"].keeper.leave_job(msgspec.structs.replace(LEAVE, last=last, last_s=8.0))
    )
    await until(lambda: job.states("a") == [8])
    assert len(fleet.nodes["a"].said) == 1, "storage may still take it"
    await leaving
    assert fleet.nodes["a"].said[-1].startswith("step 8 stays on disk in ")
    os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))  # lets the thread go


async def test_nothing_stays_where_storage_has_the_state_or_the_node_is_no_longer_wanted(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    give_storage(job, 0)
    a, b, c = (fleet.nodes[name].keeper for name in "abc")
    await a.leave_job(msgspec.structs.replace(LEAVE, stored=5))
    await b.leave_job(msgspec.structs.replace(LEAVE, ended=False, disk_over=True))
    await c.leave_job(msgspec.structs.replace(LEAVE, ended=False))
    assert [(job.root / name / "r.").exists() for name in "abc"] == [False, False, True]


async def test_a_state_that_is_newer_than_all_on_storage_stays(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    give_storage(job, 0)
    await fleet.nodes["a"].keeper.leave_job(msgspec.structs.replace(LEAVE, stored=4))
    assert job.states("a") == [5] and fleet.nodes["a"].said[-1].startswith("step 5 stays on disk in ")


class OneHost(Disked):
    """The same with nodes of one host, which share a folder, and a standby d among them."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        fleet.one_host = True

    async def begin(self) -> None:
        await self.start("d")
        await self.write(5)

    async def leave(self, name: str, leave: Leave) -> None:
        spared = tuple(rank for rank, other in enumerate(self.names) if other != name)
        await self.fleet.nodes[name].keeper.leave_job(msgspec.structs.replace(leave, spared=spared))

    def ranks(self) -> set[int]:
        return {int(path.parent.name.removeprefix("rank-")) for path in self.root.glob("r./rank-*/step-*")}


async def test_a_standby_removes_nothing_of_the_nodes_beside_it(fleet: Fleet) -> None:
    job = OneHost(fleet)
    await job.begin()
    await fleet.nodes["d"].keeper.use_run("r.")
    for name in "adbc":
        await job.leave(name, LEAVE)
    assert job.ranks() == {0, 1, 2} and fleet.nodes["d"].said == []


async def test_a_node_removes_its_own_states_and_the_last_one_the_folder(fleet: Fleet) -> None:
    job = OneHost(fleet)
    await job.begin()
    (job.root / "r." / "rank-7").mkdir()  # of a rank that is no more
    give_storage(job, 0, 1, 2)
    stored = msgspec.structs.replace(LEAVE, stored=5)
    await job.leave("a", stored)
    assert job.ranks() == {1, 2} and not (job.root / "r." / "rank-7").exists()
    job.save(8)
    await job.leave("b", msgspec.structs.replace(LEAVE, last=(FinalState(step=8, ranks=(1,)),), last_s=0.5))
    assert job.ranks() == {1, 2}, "its last write to storage fails, for rank 0 has not begun one"
    assert job.states("b") == [5, 5, 8] and "step 8 stays on disk" in fleet.nodes["b"].said[-1]
    await job.leave("b", msgspec.structs.replace(LEAVE, stored=8))
    assert job.ranks() == {2}
    await job.leave("c", stored)
    assert not (job.root / "r.").exists()


async def test_a_part_on_storage_is_no_checkpoint_before_rank_0_has_published_it(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    job.save(8)
    url = give_storage(job, 0, 1, 2)
    last = msgspec.structs.replace(LEAVE, last=(FinalState(step=8, ranks=(1,)),), last_s=2.0)
    folder = checkpoint_save.staging_folder(url, 8, Author(1, "r."))
    checkpoint_save.write_part(folder, 0, [memoryview(b"rank 0's")])  # and then its node is lost
    keeper = fleet.nodes["b"].keeper
    await keeper.leave_job(last)
    assert keeper._persisting.done == {1: 8} and retention.find_checkpoints(url) == ()
    assert job.states("b") == [8] and "step 8 stays on disk" in fleet.nodes["b"].said[-1]


async def test_a_disk_that_takes_nothing_is_said_before_the_first_write(fleet: Fleet) -> None:
    job = Disked(fleet)
    job.root.write_text("a file in its place")
    await job.start()
    await until(lambda: all(fleet.nodes[name].said for name in "abc"))
    await job.write(5)
    assert job.written() == [(-1, 5)] * 3
    [said] = fleet.nodes["a"].said
    assert str(job.root) in said and "training goes on" in said


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
