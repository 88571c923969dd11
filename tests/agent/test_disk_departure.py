"""What stays on a node's local disk when it leaves the job, and what is removed because storage has it."""

import asyncio
import threading
import time
from typing import Any, NoReturn

import msgspec
import pytest

from holdfast.agent.snapshots import checkpoint_writer
from holdfast.agent.snapshots.arena_table import SnapshotPin
from holdfast.agent.snapshots.snapshot_disk import _MEND, SnapshotDisk
from holdfast.checkpoint import checkpoint_publication, stored_checkpoints
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.storage_errors import StorageError
from holdfast.checkpoint.write_lane import WritePulse
from holdfast.model.node_errands import FinalState, Leave
from holdfast.model.state_doubt import Doubt
from holdfast.wire.rank_keeper_messages import CheckpointPolicy
from tests.agent.peers import Fleet, until
from tests.agent.test_snapshot_disk import Disked

LEAVE = Leave(id=9, code=0, grace_s=0.0, reason="the job has ended", ended=True)


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
        assert fleet.nodes[name].said[-1] == f"step 8 stays on disk in {folder}: no storage has this state ({_MEND})"


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
    assert fleet.nodes["a"].said == [
        f"step 8 stays on disk in {job.root / 'a' / 'r.'}: no storage has this state ({_MEND})"
    ]


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
    assert [one.step for one in stored_checkpoints.find_checkpoints(url)] == [8]
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
    assert stored_checkpoints.find_checkpoints(url) == ()
    assert [job.states(name) for name in "abc"] == [[5, 8]] * 3
    for name in "abc":
        stays = f"step 8 stays on disk in {job.root / name / 'r.'}: no storage has this state ({_MEND})"
        assert fleet.nodes[name].said[-1] == stays


async def test_a_published_step_of_another_generation_or_in_doubt_is_not_the_final_one(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    job.save(8)
    url = give_storage(job, 0, 1, 2)
    await end_at(job, 8, 60.0)
    b = fleet.nodes["b"].keeper._persisting
    assert b.is_published(1, 8)
    stored_checkpoints.mark_doubts(url, "r.", (Doubt(generation=1, not_after=7),))
    assert not b.is_published(1, 8)
    (fleet.folder / "ckpt" / ".holdfast-doubts.json").unlink()
    b.author = Author(2, "r.")
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
    assert fleet.nodes["a"].said == [
        f"step 5 stays on disk in {job.root / 'a' / 'r.'}: no storage has this state ({_MEND})"
    ]


@pytest.mark.usefixtures("hanging_storage")
async def test_the_final_state_goes_to_disk_in_time_when_storage_hangs(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "_STALL_S", 9.0)  # a thread waits it out when all else is over
    job = Disked(fleet)
    await job.start()
    job.save(8)
    give_storage(job, 0)
    last = (FinalState(step=8, ranks=(0,)),)
    leaving = asyncio.create_task(
        fleet.nodes["a"].keeper.leave_job(msgspec.structs.replace(LEAVE, last=last, last_s=8.0))
    )
    await until(lambda: job.states("a") == [8])
    assert len(fleet.nodes["a"].said) == 1, "storage may still take it"
    await leaving
    unknown = f"step 8 stays on disk in {job.root / 'a' / 'r.'}: whether storage has this state is not known ({_MEND})"
    assert fleet.nodes["a"].said[-1] == unknown


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
    await job.leave("b", msgspec.structs.replace(LEAVE, last=(FinalState(step=8, ranks=(1,)),), last_s=3.0))
    assert job.ranks() == {1, 2}, "its last write to storage fails, for rank 0 has not begun one"
    assert job.states("b") == [5, 5, 8]
    assert fleet.nodes["b"].said[-1].startswith("step 8 ") and f"{job.root / 'r.'}: " in fleet.nodes["b"].said[-1]
    await job.leave("b", msgspec.structs.replace(LEAVE, stored=8))
    assert job.ranks() == {2}
    await job.leave("c", stored)
    assert not (job.root / "r.").exists()


async def test_a_part_on_storage_is_no_checkpoint_before_rank_0_has_published_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Disked(fleet)
    await job.start()
    job.save(8)
    url = give_storage(job, 0, 1, 2)
    last = msgspec.structs.replace(LEAVE, last=(FinalState(step=8, ranks=(1,)),), last_s=2.0)
    folder = checkpoint_publication.staging_folder(url, 8, Author(1, "r."))
    checkpoint_publication.write_part(folder, 0, [memoryview(b"rank 0's")])  # and then its node is lost
    keeper = fleet.nodes["b"].keeper
    await keeper.leave_job(last)
    assert keeper._persisting.done == {1: 8} and stored_checkpoints.find_checkpoints(url) == ()
    assert job.states("b") == [8] and fleet.nodes["b"].said[-1].endswith(f": no storage has this state ({_MEND})")

    def fail(url: str, step: int) -> NoReturn:
        raise StorageError(f"{url} does not answer")

    monkeypatch.setattr(stored_checkpoints, "find_checkpoints", fail)
    await keeper.leave_job(last)
    assert fleet.nodes["b"].said[-1].endswith(f": whether storage has this state is not known ({_MEND})")


async def test_a_state_stays_that_a_line_before_has_a_later_step_of_on_storage(fleet: Fleet) -> None:
    """The controller names a final state only where storage has none as new, whatever it remembers."""
    job = Disked(fleet)
    await job.start()
    job.save(8)
    last = msgspec.structs.replace(LEAVE, last=(FinalState(step=8, ranks=(0,)),), last_s=60.0, stored=100)
    await fleet.nodes["a"].keeper.leave_job(last)
    assert job.states("a") == [8]


async def test_a_final_state_that_memory_lacks_is_not_said_to_be_late(fleet: Fleet) -> None:
    job = Disked(fleet)
    await job.start()
    job.save(8)
    last = msgspec.structs.replace(LEAVE, last=(FinalState(step=9, ranks=(0,)),), last_s=60.0)
    await fleet.nodes["a"].keeper.leave_job(last)
    path = job.root / "a"
    assert fleet.nodes["a"].said == [
        f"step 9 was not written to {path}: memory does not hold it for all ranks of this node",
        f"neither storage nor the disk at {path} has step 9",
    ]


async def test_a_node_that_has_left_tells_what_stays_without_another_look(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Disked(fleet)
    await job.start()
    await job.write(5)
    job.save(8)
    keeper = fleet.nodes["a"].keeper
    await keeper.leave_job(msgspec.structs.replace(LEAVE, last=(FinalState(step=8, ranks=(0,)),), last_s=60.0))

    def hang(_: SnapshotDisk) -> NoReturn:
        raise AssertionError("the event loop would wait for it")

    monkeypatch.setattr(SnapshotDisk, "list_states", hang)
    assert job.states("a") == [5, 8]
