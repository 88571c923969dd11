"""What a keeper answers to ranks, what it says it holds, and what it makes of snapshots."""

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.snapshots import rank_request_notes
from holdfast.agent.snapshots.checkpoint_writer import CheckpointWriter
from holdfast.agent.snapshots.keeper import Keeper
from holdfast.agent.snapshots.keeper_assembly import build_keeper
from holdfast.agent.snapshots.keeper_identity import KeeperIdentity
from holdfast.agent.snapshots.keeper_sockets import KeeperSockets
from holdfast.checkpoint import checkpoint_publication, checkpoint_reader, stored_checkpoints
from holdfast.checkpoint.arena import DUE, STORED, Arena
from holdfast.checkpoint.manifest import Author
from holdfast.checkpoint.storage_errors import PartFailedError
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.decoding import from_json
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import LaunchHere
from holdfast.model.restore_sources import LaunchOrigin, Restore, Source
from holdfast.wire import rank_keeper_messages
from holdfast.wire.credentials.admitted_peers import AdmittedPeers, certificate_id, join_ids
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.holder_messages import KeptArena
from holdfast.wire.rank_keeper_messages import ArenaGrant as ArenaAt
from holdfast.wire.rank_keeper_messages import (
    ArenaRequest,
    CheckpointPolicy,
    FromKeeper,
    KeeperRefusal,
    StateGrant,
    StateRequest,
    ToKeeper,
)
from tests.agent.disk_without_room import leave_no_room
from tests.agent.peers import keeper_ports
from tests.wire.given import Organisation

LAYOUT = "ab" * 32
IMAGE_BYTES = 3 * 4096


def launch(generation: int, restore: Restore | None = None) -> LaunchHere:
    return LaunchHere(
        id=generation,
        generation=generation,
        seat=Seat(node="n0", group_rank=0, first_rank=0, nproc=1),
        world_size=1,
        group_world_size=1,
        store_host="h",
        store_port=1,
        run_id="r",
        max_restarts=0,
        restore=restore or Restore(),
    )


def want(generation: int, storage: CheckpointPolicy | None = None, metadata: str = "") -> ArenaRequest:
    return ArenaRequest(
        rank=0,
        world=1,
        generation=generation,
        layout=LAYOUT,
        image_bytes=IMAGE_BYTES,
        slots=2,
        share=((0, IMAGE_BYTES),),
        metadata_path=metadata,
        storage=storage,
    )


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not look():  # noqa: ASYNC110 - it is other processes and threads that are waited for
            await asyncio.sleep(0.01)


class Bench:
    """A keeper, the memory a holder would keep for it, and a rank that talks to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory: dict[str, tuple[int, int]] = {}
        self.said: list[str] = []
        self.listed: list[CheckpointListing] = []
        self.keeper = self.fresh()

    def fresh(self) -> Keeper:
        place = KeeperIdentity(node="n0", run_id="r", socket_path=self.folder / "keeper.sock")
        return build_keeper(place, keeper_ports(self.make, self.said, self.listed))

    async def make(self, name: str, size: int) -> str:
        fd = os.memfd_create(name)
        os.ftruncate(fd, size)
        self.memory[name] = (fd, size)
        return f"/proc/{os.getpid()}/fd/{fd}"

    def kept(self) -> tuple[KeptArena, ...]:
        return tuple(
            KeptArena(name=name, bytes=size, path=f"/proc/{os.getpid()}/fd/{fd}")
            for name, (fd, size) in self.memory.items()
        )

    async def ask(self, question: ToKeeper) -> FromKeeper:
        async with asyncio.timeout(120):
            await until(self.keeper.place.socket_path.exists)
            reader, writer = await asyncio.open_unix_connection(self.keeper.place.socket_path)
            writer.write(rank_keeper_messages.encode(question) + b"\n")
            answer: FromKeeper = rank_keeper_messages.from_keeper(await reader.readline())
            writer.close()
            return answer

    async def arena(self, question: ArenaRequest) -> Arena:
        answer = await self.ask(question)
        assert isinstance(answer, ArenaAt), answer
        return Arena.open(answer.path)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(made.keeper.serve()), tasks.create_task(made.keeper.watch_snapshots())]
        yield made
        for task in running:
            task.cancel()
    for fd, _ in made.memory.values():
        with suppress(OSError):
            os.close(fd)


def snapshot(arena: Arena, step: int, generation: int = 1, flags: int = 0) -> bytes:
    slot = arena.begin_slot(step, generation, flags)
    assert slot is not None
    content = os.urandom(IMAGE_BYTES)
    slot.image[:] = content
    slot.seal()
    return content


def from_own_memory(step: int) -> Restore:
    return Restore(step=step, sources=(Source(rank=0, own=True, nodes=("n0",)),))


def shown(node: str, serial: str) -> dict[str, object]:
    return {"subjectAltName": (("URI", f"holdfast:node:{node}"),), "serialNumber": serial}


def listed(*names: tuple[str, str]) -> bytes:
    return join_ids(certificate_id(node, serial) for node, serial in names)


def sockets(folder: Path, keys: KeyFiles | None = None) -> KeeperSockets:
    return KeeperSockets(folder / "k", "r", keys or Organisation(folder / "ca").keys("n0"), "127.0.0.1")


def test_only_whom_the_controller_has_listed_is_a_peer(tmp_path: Path) -> None:
    links = sockets(tmp_path)
    guard = links._guard
    assert guard and not guard.accepts_certificate(shown("b", "0B")), "nobody has told of anybody"
    links.admit_peers(AdmittedPeers(members=listed(("a", "0A"), ("b", "0B"))))
    assert guard.accepts_certificate(shown("b", "0B")) and guard.accepts_caller(shown("b", "0B"))
    assert not guard.accepts_certificate({**shown("b", "0B"), "subjectAltName": ()}), "it names no node"
    for other in (shown("b", "0A"), shown("b", "0C"), shown("c", "0B")):
        assert not guard.accepts_certificate(other), "another certificate for the name, or another name for it"
    links.admit_peers(AdmittedPeers(members=listed(("a", "0A"))))
    assert not guard.accepts_certificate(shown("b", "0B")) and guard.accepts_certificate(shown("a", "0A"))


def test_who_is_leaving_may_be_asked_and_may_not_ask(tmp_path: Path) -> None:
    links = sockets(tmp_path)
    links.admit_peers(AdmittedPeers(members=listed(("a", "0A")), leaving=listed(("b", "0B"))))
    guard = links._guard
    assert guard and guard.accepts_certificate(shown("b", "0B")) and not guard.accepts_caller(shown("b", "0B"))


def test_a_node_that_was_evicted_stays_so_when_the_agent_restarts_without_a_controller(tmp_path: Path) -> None:
    keys = Organisation(tmp_path / "ca").keys("n0")
    older = sockets(tmp_path, keys)
    older.admit_peers(AdmittedPeers(members=listed(("a", "0A"), ("b", "0B"))))
    older.admit_peers(AdmittedPeers(members=listed(("a", "0A")), leaving=listed(("c", "0C"))))
    guard = sockets(tmp_path, keys)._guard
    assert guard and guard.accepts_caller(shown("a", "0A")), "a peer that was one is one"
    assert not guard.accepts_certificate(shown("b", "0B"))
    assert guard.accepts_certificate(shown("c", "0C")) and not guard.accepts_caller(shown("c", "0C"))
    (tmp_path / "peers.json").write_bytes(b'{"members":"%%')
    guard = sockets(tmp_path, keys)._guard
    assert guard and not guard.accepts_certificate(shown("a", "0A")), "nobody, until the controller tells"


async def test_a_snapshot_outlives_its_rank(bench: Bench) -> None:
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1))
    assert await bench.ask(StateRequest(rank=0, generation=1)) == StateGrant(source="none", run="r.")
    snapshot(arena, 6)
    content = snapshot(arena, 7)
    assert sorted(copy.step for copy in bench.keeper.list_copies()) == [6, 7]
    bench.keeper.begin_launch(launch(2, from_own_memory(7)))
    again = await bench.arena(want(2))
    state = await bench.ask(StateRequest(rank=0, generation=2))
    assert isinstance(state, StateGrant) and (state.source, state.step) == ("memory", 7)
    assert bytes(again.slot_image(state.slot)) == content


async def test_a_copy_tells_whose_state_it_is(bench: Bench) -> None:
    bench.keeper.begin_launch(launch(2))
    arena = await bench.arena(want(2))
    snapshot(arena, 6, 2, STORED)
    snapshot(arena, 7, 2)
    assert sorted((copy.step, copy.generation) for copy in bench.keeper.list_copies()) == [(6, 2), (7, 2)]


async def test_a_launch_drops_what_is_of_another_line_though_of_an_older_step(bench: Bench) -> None:
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1))
    snapshot(arena, 5, 1)
    snapshot(arena, 6, 2)
    line = (LaunchOrigin(generation=1), LaunchOrigin(generation=2), LaunchOrigin(generation=3, step=7, maker=1))
    bench.keeper.begin_launch(msgspec.structs.replace(launch(3, from_own_memory(7)), line=line))
    assert [copy.step for copy in bench.keeper.list_copies()] == [5], "2 was begun anew, and 3 went on from 1"


async def test_what_came_after_the_restored_step_is_dropped(bench: Bench) -> None:
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1))
    snapshot(arena, 6)
    snapshot(arena, 7)
    bench.keeper.begin_launch(launch(2, from_own_memory(6)))
    assert [copy.step for copy in bench.keeper.list_copies()] == [6]
    bench.keeper.begin_launch(launch(3))
    assert bench.keeper.list_copies() == (), "a generation that starts from nothing leaves no line to go back to"


@pytest.mark.parametrize("full", [False, True])
async def test_one_that_was_away_keeps_nothing_of_the_line_that_was_left(
    bench: Bench, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1))
    snapshot(arena, 4)
    if full:  # such a node cannot start ranks, and would hand over what it holds as it leaves
        leave_no_room(monkeypatch, "launch.json")
    error = bench.keeper.begin_launch(msgspec.structs.replace(launch(2, from_own_memory(4)), astray=True))
    assert ("launch.json" in error) is full
    assert bench.keeper.list_copies() == (), "step 4 was made again by others, and is another one by now"


async def test_a_request_that_cannot_be_noted_is_granted_and_noted_when_there_is_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full: the memory is there, and training must start."""
    monkeypatch.setattr(rank_request_notes, "_ROOM_S", 0.0)
    bench.keeper.begin_launch(launch(1))
    with monkeypatch.context() as full:
        leave_no_room(full, "want-0.json")
        snapshot(await bench.arena(want(1)), 7)
        assert [copy.step for copy in bench.keeper.list_copies()] == [7]
        await bench.ask(want(1))
    [told] = [said for said in bench.said if os.strerror(errno.ENOSPC) in said]
    assert "rank 0 " in told
    watching = asyncio.create_task(bench.keeper.watch_snapshots())
    async with asyncio.timeout(60):
        while not (bench.folder / "want-0.json").is_file():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert from_json((bench.folder / "want-0.json").read_bytes(), ArenaRequest) == want(1)


async def test_a_damaged_snapshot_is_named_and_not_offered_again(bench: Bench) -> None:
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1))
    snapshot(arena, 6)
    snapshot(arena, 7)
    newest = arena.list_sealed()[0]
    arena.write_checksums(newest.slot)
    arena.slot_image(newest.slot)[5000] ^= 1
    bench.keeper.begin_launch(launch(2, from_own_memory(7)))
    answer = await bench.ask(StateRequest(rank=0, generation=2))
    assert isinstance(answer, KeeperRefusal) and "block 0" in answer.why
    assert "rank 0 at step 7" in bench.said[0]
    assert [copy.step for copy in bench.keeper.list_copies()] == [6]


async def test_another_layout_gets_other_memory(bench: Bench) -> None:
    bench.keeper.begin_launch(launch(1))
    snapshot(await bench.arena(want(1)), 7)
    other = await bench.arena(msgspec.structs.replace(want(1), layout="cd" * 32))
    assert other.list_sealed() == ()


async def test_a_rank_of_a_generation_that_is_over_gets_nothing(bench: Bench) -> None:
    bench.keeper.begin_launch(launch(2))
    answer = await bench.ask(want(1))
    assert isinstance(answer, KeeperRefusal) and "generation 1 is over" in answer.why


async def test_the_next_agent_knows_what_was_kept(bench: Bench) -> None:
    bench.keeper.begin_launch(launch(1))
    snapshot(await bench.arena(want(1)), 7)
    bench.keeper.begin_launch(launch(2, from_own_memory(7)))
    successor = bench.fresh()
    successor.adopt_arenas(bench.kept())
    assert [copy.step for copy in successor.list_copies()] == [7]
    answer = await successor._answer_request(rank_keeper_messages.encode(StateRequest(rank=0, generation=2)))
    assert isinstance(answer, StateGrant) and answer.step == 7


def published(url: str, step: int) -> bool:
    return any(found.step == step for found in stored_checkpoints.find_checkpoints(url))


async def test_due_steps_become_checkpoints(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "metadata").write_bytes(b"blob")
    storage = CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=2, keep=1)
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1, storage, str(tmp_path / "metadata")))
    content = b""
    for step in (1, 2, 3, 4):
        content = snapshot(arena, step)
        if step % 2 == 0:
            await until(partial(published, storage.url, step))
            await until(lambda: not bench.keeper._persisting.under_way)  # or the next would be left out
    await until(lambda: len(stored_checkpoints.find_checkpoints(storage.url)) == 1)  # older ones go a bit later
    [found] = stored_checkpoints.find_checkpoints(storage.url)
    assert found.step == 4 and checkpoint_reader.verify_checkpoint(found.url) == ()
    into = bytearray(IMAGE_BYTES)
    checkpoint_reader.read_part(found.url, 0, memoryview(into))
    assert bytes(into) == content


async def test_a_folder_that_is_removed_is_made_anew_and_guarded_again(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "metadata").write_bytes(b"blob")
    storage = CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=1)
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1, storage, str(tmp_path / "metadata")))
    for step in (1, 2):
        snapshot(arena, step)
        await until(partial(published, storage.url, step))
        await until(lambda: not bench.keeper._persisting.under_way)
        if step == 1:
            shutil.rmtree(storage.url)
    assert (tmp_path / "ckpt" / ".holdfast-author.json").exists()
    await until(lambda: bench.said)
    assert bench.said[0].startswith(f"before step 2 was written, {storage.url} was removed; it is made anew")


async def test_a_step_that_is_forced_becomes_a_checkpoint_too(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "metadata").write_bytes(b"blob")
    storage = CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=1000)
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1, storage, str(tmp_path / "metadata")))
    snapshot(arena, 6)
    snapshot(arena, 7, flags=DUE)
    await until(partial(published, storage.url, 7))
    assert [found.step for found in stored_checkpoints.find_checkpoints(storage.url)] == [7]


async def test_what_another_release_goes_on_with_becomes_a_checkpoint(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "metadata").write_bytes(b"blob")
    storage = CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=1000)
    bench.keeper.begin_launch(launch(1))
    snapshot(await bench.arena(want(1, storage, str(tmp_path / "metadata"))), 7)
    bench.keeper.begin_launch(launch(2, msgspec.structs.replace(from_own_memory(7), store=True)))
    await bench.arena(want(2, storage, str(tmp_path / "metadata")))
    await until(partial(published, storage.url, 7))


async def test_storage_that_fails_costs_a_sentence(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = CheckpointPolicy(url=str(tmp_path / "file" / "below"), every_steps=1)
    bench.keeper.begin_launch(launch(1))
    arena = await bench.arena(want(1, storage))
    snapshot(arena, 1)
    await until(lambda: bench.said)
    assert bench.said[0].startswith("rank 0: step 1 ") and str(tmp_path / "file") in bench.said[0]
    missed = bench.keeper._persisting.missed_checkpoint
    assert missed and missed.step == 1 and missed.why in bench.said[0]
    assert arena.begin_slot(2, 1) is not None, "the snapshot is not held back"


async def test_a_write_that_the_next_generation_ends_is_no_trouble_of_the_storage(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast.keeper")
    storage = CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=1)
    bench.keeper.begin_launch(launch(1))
    other = msgspec.structs.replace(want(1, storage), rank=1, world=2)  # rank 0 never begins
    snapshot(await bench.arena(other), 1)
    lanes = bench.keeper._persisting._lanes
    await until(lambda: lanes and next(iter(lanes.values()))._pulse.waiting)
    bench.keeper.begin_launch(launch(2))
    await until(lambda: "the write was given up" in caplog.text)
    assert bench.said == []


async def test_what_a_killed_agent_has_not_written_is_not_waited_for(bench: Bench, tmp_path: Path) -> None:
    storage, author = CheckpointPolicy(url=str(tmp_path / "ckpt"), every_steps=2), Author(1, "r.")
    two, four = (checkpoint_publication.staging_folder(storage.url, step, author) for step in (2, 4))
    checkpoint_publication.write_part(
        two, 0, [memoryview(b"rank 0's")]
    )  # rank 1's agent is killed before its own is there
    bench.keeper.begin_launch(launch(1))
    one = msgspec.structs.replace(want(1), rank=1, world=2)
    arena = await bench.arena(one)
    snapshot(arena, 4)

    successor = CheckpointWriter(bench.said.append, SystemClock(), bench.listed.append)
    successor.begin_generation(author)
    successor.on_want(msgspec.structs.replace(one, storage=storage))
    successor.mark_recalled()
    waiting = asyncio.create_task(asyncio.to_thread(checkpoint_publication.collect_parts, two, 2, 50.0))
    writing = asyncio.create_task(successor.write_snapshot(1, arena, next(iter(arena.list_sealed()))))
    with pytest.raises(PartFailedError):
        await waiting
    checkpoint_publication.write_part(four, 0, [memoryview(b"rank 0's")])
    assert [part.rank for part in checkpoint_publication.collect_parts(four, 2, 20.0)] == [0, 1]
    await writing
    assert bench.said == [] and successor._unwritten == {1: set()}
