"""Copies between nodes: what is held, what is sent, and how a lost rank's state is gathered again."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.keeper import Keeper, Place
from holdfast.checkpoint.arena import Arena, Sealed
from holdfast.checkpoint.layout import Layout, Spec, arrange
from holdfast.checkpoint.link import want_of
from holdfast.core.restore import choose
from holdfast.model.copy import Aim, Copy, Restore
from holdfast.model.errand import LaunchHere
from holdfast.model.topology import Seat
from holdfast.wire import keeping
from holdfast.wire.holding import KeptArena
from holdfast.wire.keeping import Arena as ArenaAt
from holdfast.wire.keeping import Denied, FromKeeper, Resume, State, ToKeeper

pytestmark = pytest.mark.timeout(60)


def spec(key: str, size: int, replicas: tuple[int, ...]) -> Spec:
    return Spec(
        key=key,
        path=(key,),
        bytes=size,
        dtype="uint8",
        shape=(size,),
        whole=(size,),
        start=(0,),
        group=replicas,
        replicas=replicas,
    )


def layout(rank: int, world: int, shared: bool) -> Layout:
    """Ranks that hold the same weights, or each its own; and something of its own beside."""
    everybody = tuple(range(world)) if shared else (rank,)
    specs = [spec("weights", 3_000_000, everybody), spec("bias", 1000, everybody), spec(f"own.{rank}", 5000, (rank,))]
    return arrange(specs, lambda one: (64, one.bytes + 128), rank=rank, world=world, form="test")


class Node:
    """A keeper, the memory a holder would keep for it, and one rank that talks to it."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self.name = name
        self.memory: dict[str, int] = {}
        self.said: list[str] = []
        self.keeper = Keeper(Place(node=name, run_id="r", socket_path=folder / "k"), self.make)
        self.keeper.say = self.said.append
        self.folder = folder

    async def make(self, name: str, size: int) -> str:
        if name in self.memory:
            os.close(self.memory.pop(name))
        if size:
            self.memory[name] = os.memfd_create(name)
            os.ftruncate(self.memory[name], size)
        return f"/proc/{os.getpid()}/fd/{self.memory.get(name, -1)}"

    async def ask(self, question: ToKeeper) -> FromKeeper:
        return await self.keeper._answer(keeping.encode(question))

    async def arena(self, plan: Layout, generation: int, slots: int = 3) -> Arena:
        (self.folder / keeping.plan_name(plan.rank, plan.digest.hex())).write_bytes(msgspec.msgpack.encode(plan))
        want = msgspec.structs.replace(want_of(plan, slots, "", None), generation=generation)
        answer = await self.ask(want)
        assert isinstance(answer, ArenaAt), answer
        return Arena.open(answer.path)


class Fleet:
    """Nodes of one rank each."""

    def __init__(self, folder: Path, tasks: asyncio.TaskGroup) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}
        self.seats: tuple[Seat, ...] = ()
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []

    async def add(self, name: str) -> Node:
        node = self.nodes[name] = Node(self.folder / name, name)
        for work in (node.keeper.serve(), node.keeper.watch()):
            self._running.append(self._tasks.create_task(work))
        await until(lambda: node.keeper.address[1])
        return node

    def launch(self, generation: int, *names: str, restore: Restore | None = None) -> None:
        self.seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(names))
        for number, seat in enumerate(self.seats):
            peer = names[(number + 1) % len(names)]
            aim = Aim(generation=generation, peer=peer, peer_at=self.nodes[peer].keeper.address)
            errand = LaunchHere(
                id=generation,
                generation=generation,
                seat=seat,
                world_size=len(names),
                group_world_size=len(names),
                store_host="h",
                store_port=1,
                run_id="r",
                max_restarts=0,
                restore=restore or Restore(),
                aim=aim,
            )
            self.nodes[seat.node].keeper.launched(errand)

    async def aim(self, floor: int, next: int) -> None:
        for seat in self.seats:
            keeper = self.nodes[seat.node].keeper
            await keeper.aimed(msgspec.structs.replace(keeper.backing.aim, floor=floor, next=next))

    def copies(self, *names: str) -> list[Copy]:
        return [copy for name in names for copy in self.nodes[name].keeper.copies()]

    def plan(self, *alive: str) -> Restore:
        """As the controller would, when only these still answer."""
        plan = choose(self.seats, self.copies(*alive))
        keepers = {name: self.nodes[name].keeper.address for name in alive}
        return msgspec.structs.replace(plan, keepers=keepers)

    def end(self) -> None:
        for task in self._running:
            task.cancel()
        for node in self.nodes.values():
            for fd in node.memory.values():
                with suppress(OSError):
                    os.close(fd)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with asyncio.TaskGroup() as tasks:
        made = Fleet(tmp_path, tasks)
        yield made
        made.end()


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not look():  # noqa: ASYNC110 - it is other threads that are waited for
            await asyncio.sleep(0.01)


def save(arena: Arena, plan: Layout, step: int, generation: int) -> None:
    """Shared bytes are the same on all ranks, a rank's own are not."""
    slot = arena.begin(step, generation)
    assert slot is not None
    slot.image[:] = bytes(len(slot.image))
    for item in plan.items:
        rank = plan.rank if len(item.spec.replicas) == 1 else 99
        content = bytes((step * 7 + rank * 31 + at) % 251 for at in range(97))
        whole = content * (item.length // 97 + 1)
        slot.image[item.offset : item.end] = whole[: item.length]
    slot.seal()


def image(arena: Arena, plan: Layout, step: int) -> list[bytes]:
    """The records; what lies between them is nobody's."""
    found: Sealed = next(one for one in arena.sealed() if one.step == step)
    memory = arena.image(found.slot)
    return [bytes(memory[item.offset : item.end]) for item in plan.items]


@pytest.mark.parametrize("shared", [True, False])
async def test_a_lost_rank_is_gathered_from_its_peer_and_its_replicas(fleet: Fleet, shared: bool) -> None:
    plans = [layout(rank, 3, shared) for rank in range(3)]
    for name in ("a", "b", "c", "spare"):
        await fleet.add(name)
    fleet.launch(1, "a", "b", "c")
    arenas = [await fleet.nodes[n].arena(plan, 1) for n, plan in zip("abc", plans, strict=True)]
    await fleet.aim(-1, 5)
    for step in (4, 5, 6, 7):
        for arena, plan in zip(arenas, plans, strict=True):
            save(arena, plan, step, 1)
        await asyncio.sleep(0.1)
    await until(lambda: all(fleet.nodes[n].keeper.backing.backed == 5 for n in "abc"))
    expected = image(arenas[1], plans[1], 5)
    fleet.seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(("a", "spare", "c")))
    restore = fleet.plan("a", "c")
    assert restore.step == 5 and [source.own for source in restore.sources] == [True, False, True]
    fleet.launch(2, "a", "spare", "c", restore=restore)
    spare = fleet.nodes["spare"]
    arena = await spare.arena(plans[1], 2)
    answer = await spare.ask(Resume(rank=1, generation=2))
    assert isinstance(answer, State), answer
    assert (answer.source, answer.step) == ("peer", 5)
    assert image(arena, plans[1], 5) == expected
    assert "rank 1 was given" in spare.said[-1]


class Trained:
    """Three ranks on three nodes that take snapshots in step."""

    def __init__(self, fleet: Fleet, shared: bool = True) -> None:
        self.fleet = fleet
        self.plans = [layout(rank, 3, shared) for rank in range(3)]
        self.arenas: list[Arena] = []

    async def start(self, *more: str, slots: int = 3) -> None:
        for name in ("a", "b", "c", *more):
            await self.fleet.add(name)
        self.fleet.launch(1, "a", "b", "c")
        pairs = zip("abc", self.plans, strict=True)
        self.arenas = [await self.fleet.nodes[name].arena(plan, 1, slots) for name, plan in pairs]

    def save(self, *steps: int) -> None:
        for step in steps:
            for arena, plan in zip(self.arenas, self.plans, strict=True):
                save(arena, plan, step, 1)

    async def back_up(self, step: int, floor: int = -1) -> None:
        await self.fleet.aim(floor, step)
        self.save(step)
        await until(lambda: all(self.backed(name) == step for name in "abc"))
        await self.fleet.aim(step, -1)

    def backed(self, name: str) -> int:
        return self.fleet.nodes[name].keeper.backing.backed

    def steps(self, rank: int) -> set[int]:
        return {one.step for one in self.arenas[rank].sealed()}


def backups(node: Node) -> set[tuple[int, int]]:
    """Ranks and steps that a node holds for others."""
    own = {arena.rank for _, arena in node.keeper._arenas.values()}
    return {(copy.rank, copy.step) for copy in node.keeper.copies() if copy.rank not in own}


async def test_the_floor_stays_while_snapshots_roll_on(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    job.save(*range(6, 20))
    assert all(job.steps(rank) == {5, 18, 19} for rank in range(3))
    await job.back_up(20, floor=5)
    job.save(*range(21, 25))
    assert all(job.steps(rank) == {20, 23, 24} for rank in range(3))
    assert backups(fleet.nodes["b"]) == {(0, 20), (0, 5)}


async def test_a_floor_that_is_not_confirmed_does_not_cost_the_one_before(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    for step in (10, 20, 30):  # aimed at, copied, and never agreed upon
        await fleet.aim(5, step)
        job.save(step)
        await until(lambda step=step: all(job.backed(name) == step for name in "abc"))  # type: ignore[misc]
    assert all((rank, 5) in backups(fleet.nodes[name]) for rank, name in enumerate("bca"))
    assert all(5 in job.steps(rank) for rank in range(3))


async def test_ranks_of_a_node_agree_on_the_step(fleet: Fleet) -> None:
    """Of two ranks one has gone on before we looked."""
    node = await fleet.add("a")
    await fleet.add("b")
    seat = Seat(node="a", group_rank=0, first_rank=0, nproc=2)
    fleet.launch(1, "a", "b")
    keeper = node.keeper
    keeper.backing.begin(1, 2, -1)
    keeper.backing.aimed(Aim(generation=1, peer="b", peer_at=fleet.nodes["b"].keeper.address, next=5))
    plans = [layout(rank, 2, False) for rank in range(2)]
    arenas = [await node.arena(plan, 1) for plan in plans]
    assert seat.nproc == len(arenas)
    for step in (6, 7):
        save(arenas[0], plans[0], step, 1)
    for step in (7, 8):
        save(arenas[1], plans[1], step, 1)
    await until(lambda: keeper.backing.backed == 7)


async def test_with_two_slots_nothing_is_copied_and_it_is_said(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start(slots=2)
    job.save(1, 2)
    backing = fleet.nodes["a"].keeper.backing
    assert backing.sealed() == -1 and "takes 3 slots" in fleet.nodes["a"].said[0]
    assert backing.sealed() == -1 and len(fleet.nodes["a"].said) == 1, "once"


async def test_a_damaged_copy_is_not_given(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start("spare")
    await job.back_up(5)
    await job.back_up(9, floor=5)
    keeper = fleet.nodes["c"].keeper
    copy = keeper._shelf._backups[1].arena
    newest = copy.sealed()[0]
    await until(lambda: copy.checked(newest.slot))
    copy.image(newest.slot)[100] ^= 1
    fleet.seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(("a", "spare", "c")))
    fleet.launch(2, "a", "spare", "c", restore=fleet.plan("a", "c"))
    spare = fleet.nodes["spare"]
    await spare.arena(job.plans[1], 2)
    answer = await spare.ask(Resume(rank=1, generation=2))
    assert isinstance(answer, Denied) and "step 9 of rank 1 cannot be had" in answer.why
    assert "the copy of rank 1 is damaged" in fleet.nodes["c"].said[-1]
    assert fleet.plan("a", "c").step == 5, "the one before"


async def test_copies_of_a_line_that_was_left_are_dropped(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    fleet.launch(2, "a", "b", "c")  # from nothing
    assert fleet.copies("a", "b", "c") == []


async def test_memory_of_copies_that_nobody_needs_is_given_back(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    assert "backup-0" in fleet.nodes["b"].memory
    await fleet.nodes["b"].keeper.aimed(Aim(generation=1, floor=7))
    assert "backup-0" not in fleet.nodes["b"].memory


async def test_the_next_agent_holds_what_was_held(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    await job.back_up(5)
    node = fleet.nodes["b"]
    successor = Keeper(node.keeper.place, node.make)
    kept = [
        KeptArena(name=name, bytes=os.fstat(fd).st_size, path=f"/proc/{os.getpid()}/fd/{fd}")
        for name, fd in node.memory.items()
    ]
    successor.recall(tuple(kept))
    assert {(copy.rank, copy.step) for copy in successor.copies()} == {(0, 5), (1, 5)}
    aim = msgspec.structs.replace(node.keeper.backing.aim, floor=5)
    await successor.aimed(aim)
    job.save(6, 7, 8)
    assert job.steps(1) == {5, 7, 8}


async def test_a_peer_that_is_gone_is_told_of_once(fleet: Fleet) -> None:
    job = Trained(fleet)
    await job.start()
    for seat in fleet.seats:
        keeper = fleet.nodes[seat.node].keeper
        await keeper.aimed(Aim(generation=1, peer="gone", peer_at=("127.0.0.1", 1), next=3))
    job.save(3)
    await until(lambda: fleet.nodes["a"].said)
    assert "does not get to gone" in fleet.nodes["a"].said[0] and job.backed("a") == -1
    await fleet.nodes["a"].keeper.aimed(Aim(generation=1, peer="b", peer_at=fleet.nodes["b"].keeper.address, next=4))
    job.save(4)
    await until(lambda: job.backed("a") == 4)
