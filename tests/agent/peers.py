"""Nodes that keep for each other: keepers over real links, without agents, holders or ranks."""

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.agent.agent_clock import SystemClock
from holdfast.agent.snapshots.keeper import Keeper
from holdfast.agent.snapshots.keeper_assembly import build_keeper
from holdfast.agent.snapshots.keeper_identity import KeeperIdentity
from holdfast.agent.snapshots.keeper_interfaces import KeeperPorts, MakeArena
from holdfast.agent.snapshots.step_gap_watch import UnwatchedRanks
from holdfast.checkpoint.arena import Arena, SealedSnapshot
from holdfast.checkpoint.image_layout import ImageLayout, RecordSpec, arrange_image
from holdfast.checkpoint.keeper_client import make_want
from holdfast.core.snapshots.checkpoint_listing import CheckpointListing
from holdfast.core.snapshots.copy_keepers import choose_keepers
from holdfast.core.snapshots.disk_floor_coordination import DiskLimits
from holdfast.core.snapshots.lineage import Line
from holdfast.core.snapshots.parity_placement import place_halves
from holdfast.core.snapshots.restore_choice import choose_known_restore
from holdfast.model.copy_aim import Aim, Half
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import LaunchHere
from holdfast.model.restore_sources import Restore
from holdfast.model.state_copy import Copy
from holdfast.wire import rank_keeper_messages
from holdfast.wire.credentials.admitted_peers import AdmittedPeers, certificate_id, join_ids
from holdfast.wire.credentials.certificate_authority import CertificateAuthority, enrol_local_node
from holdfast.wire.credentials.mutual_tls import KeyFiles
from holdfast.wire.holder_messages import KeptArena
from holdfast.wire.rank_keeper_messages import ArenaGrant as ArenaAt
from holdfast.wire.rank_keeper_messages import FromKeeper, ToKeeper


def spec(key: str, size: int, replicas: tuple[int, ...]) -> RecordSpec:
    return RecordSpec(
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


def layout(rank: int, world: int, shared: bool) -> ImageLayout:
    """Ranks that hold the same weights, or each its own; and something of its own beside."""
    everybody = tuple(range(world)) if shared else (rank,)
    specs = [spec("weights", 3_000_000, everybody), spec("bias", 1000, everybody), spec(f"own.{rank}", 5000, (rank,))]
    return arrange_image(specs, lambda one: (64, one.bytes + 128), rank=rank, world=world, form="test")


def keeper_ports(make: MakeArena, said: list[str], listed: list[CheckpointListing] | None = None) -> KeeperPorts:
    """Memory from the test, and lists of what is said and listed; no controller hears of the rest."""
    listed = [] if listed is None else listed
    return KeeperPorts(
        make_arena=make,
        clock=SystemClock(),
        say=said.append,
        report_progress=lambda: None,
        report_checkpoints=listed.append,
        report_marks=lambda marks: None,
        network=UnwatchedRanks(),
    )


class Node:
    """A keeper, the memory a holder would keep for it, and one rank that talks to it."""

    def __init__(self, folder: Path, name: str, disk: DiskLimits, keys: KeyFiles | None) -> None:
        folder.mkdir(exist_ok=True)
        self.disk = disk
        self.keys = keys
        self.name = name
        self.memory: dict[str, int] = {}
        self.said: list[str] = []
        self.folder = folder
        self.keeper = self._new_keeper()
        self.running: list[asyncio.Task[None]] = []

    def _new_keeper(self) -> Keeper:
        place = KeeperIdentity(
            node=self.name, run_id="r", socket_path=self.folder / "k", disk=self.disk, keys=self.keys, host="127.0.0.1"
        )
        return build_keeper(place, keeper_ports(self.make, self.said))

    def successor(self) -> Keeper:
        keeper = self._new_keeper()
        kept = [
            KeptArena(name=name, bytes=os.fstat(fd).st_size, path=f"/proc/{os.getpid()}/fd/{fd}")
            for name, fd in self.memory.items()
        ]
        keeper.adopt_arenas(tuple(kept))
        return keeper

    async def make(self, name: str, size: int) -> str:
        if name in self.memory:
            os.close(self.memory.pop(name))
        if size:
            self.memory[name] = os.memfd_create(name)
            os.ftruncate(self.memory[name], size)
        return f"/proc/{os.getpid()}/fd/{self.memory.get(name, -1)}"

    async def ask(self, question: ToKeeper) -> FromKeeper:
        return await self.keeper._answer_request(rank_keeper_messages.encode(question))

    async def arena(self, plan: ImageLayout, generation: int, slots: int = 3) -> Arena:
        (self.folder / rank_keeper_messages.layout_file_name(plan.rank, plan.digest.hex())).write_bytes(
            msgspec.msgpack.encode(plan)
        )
        want = msgspec.structs.replace(make_want(plan, slots, "", None), generation=generation)
        answer = await self.ask(want)
        assert isinstance(answer, ArenaAt), answer
        return Arena.open(answer.path)


class Fleet:
    """Nodes of one rank each."""

    def __init__(self, folder: Path, tasks: asyncio.TaskGroup) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}
        self.seats: tuple[Seat, ...] = ()
        self.parity = False
        self.two_copies = False
        self.disk = DiskLimits()  # with a path: each node has a folder of its own there
        self.one_host = False  # nodes share that folder
        self.authority: CertificateAuthority | None = None  # with one, keepers take each other for other hosts'
        self._tasks = tasks

    async def add(self, name: str) -> Node:
        own = self.disk.path and not self.one_host
        disk = msgspec.structs.replace(self.disk, path=f"{self.disk.path}/{name}") if own else self.disk
        keys = enrol_local_node(self.authority, name, self.folder / name) if self.authority else None
        node = self.nodes[name] = Node(self.folder / name, name, disk, keys)
        await self._run(node)
        if self.authority:  # as the controller tells all nodes whenever one is new
            serials = self.authority.node_serials().serials
            ids = join_ids(certificate_id(known, serial) for known, serial in serials.items())
            for one in self.nodes.values():
                one.keeper.admit_peers(AdmittedPeers(members=ids))
        return node

    async def _run(self, node: Node) -> None:
        node.running = [self._tasks.create_task(work) for work in (node.keeper.serve(), node.keeper.watch_snapshots())]
        await until(lambda: node.keeper.address[0])

    async def reboot(self, name: str) -> None:
        """As after a loss of power: what lies on the disk is there, and the controller tells of which run it may be."""
        node = self.nodes[name]
        for task in node.running:
            task.cancel()
        for fd in node.memory.values():
            os.close(fd)
        shutil.rmtree(node.folder)
        said = node.said
        node = await self.add(name)
        node.said[:] = said
        await node.keeper.use_run("r.")

    async def restart(self, name: str) -> None:
        """As after the death of an agent: memory and notes are there, all else is not."""
        node = self.nodes[name]
        for task in node.running:
            task.cancel()
        node.keeper = node.successor()
        await self._run(node)

    def launch(self, generation: int, *names: str, restore: Restore | None = None, line: Line = ()) -> None:
        self.seats = tuple(Seat(node=n, group_rank=i, first_rank=i, nproc=1) for i, n in enumerate(names))
        laid, _ = place_halves(self.seats, ()) if self.parity else ({}, "")
        for number, seat in enumerate(self.seats):
            two = tuple(self._at(half) for half in laid.get(seat.node, ()))
            peer = two[0].keeper if two else names[(number + 1) % len(names)]
            at = self.nodes[peer].keeper.address
            ward = self.seats[number - 1]
            aim = Aim(generation=generation, peer=peer, peer_at=at, halves=two, wards=(ward,) if self.authority else ())
            aim = self._aim_at_two(aim, seat.node) if self.two_copies else aim
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
                line=line,
            )
            self.nodes[seat.node].keeper.begin_launch(errand)

    def _aim_at_two(self, aim: Aim, node: str) -> Aim:
        peer, second = choose_keepers(self.seats, (), 2)[0][node]
        peer_at, second_at = (self.nodes[one].keeper.address for one in (peer, second))
        return msgspec.structs.replace(aim, peer=peer, peer_at=peer_at, second=second, second_at=second_at)

    def _at(self, half: Half) -> Half:
        return msgspec.structs.replace(half, keeper_at=self.nodes[half.keeper].keeper.address)

    async def aim(self, floor: int, next: int) -> None:
        for seat in self.seats:
            keeper = self.nodes[seat.node].keeper
            aim = keeper.backing.aim
            two = tuple(self._at(half) for half in aim.halves)
            at = self.nodes[aim.peer].keeper.address
            await keeper.apply_aim(msgspec.structs.replace(aim, floor=floor, next=next, peer_at=at, halves=two))

    def copies(self, *names: str) -> list[Copy]:
        return [copy for name in names for copy in self.nodes[name].keeper.list_copies()]

    def plan(self, *alive: str, line: Line = ()) -> Restore:
        """As the controller would, when only these still answer."""
        plan = choose_known_restore(self.seats, self.copies(*alive), alive, line=line)
        keepers = {name: self.nodes[name].keeper.address for name in alive}
        return msgspec.structs.replace(plan, keepers=keepers)

    def end(self) -> None:
        for node in self.nodes.values():
            for task in node.running:
                task.cancel()
            for fd in node.memory.values():
                with suppress(OSError):
                    os.close(fd)


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not look():  # noqa: ASYNC110 - it is other threads that are waited for
            await asyncio.sleep(0.01)


def save(arena: Arena, plan: ImageLayout, step: int, generation: int) -> None:
    """Shared bytes are the same on all ranks, a rank's own are not. Each generation makes a step in its own way."""
    slot = arena.begin_slot(step, generation)
    assert slot is not None
    slot.image[:] = bytes(len(slot.image))
    for item in plan.items:
        rank = plan.rank if len(item.spec.replicas) == 1 else 99
        content = bytes((step * 7 + rank * 31 + generation * 13 + at) % 251 for at in range(97))
        whole = content * (item.length // 97 + 1)
        slot.image[item.offset : item.end] = whole[: item.length]
    slot.seal()


def image(arena: Arena, plan: ImageLayout, step: int) -> list[bytes]:
    """The records; what lies between them is nobody's."""
    found: SealedSnapshot = next(one for one in arena.list_sealed() if one.step == step)
    memory = arena.slot_image(found.slot)
    return [bytes(memory[item.offset : item.end]) for item in plan.items]


class Trained:
    """Ranks on as many nodes, by default three, that take snapshots in step."""

    def __init__(self, fleet: Fleet, shared: bool = True, names: str = "abc") -> None:
        self.fleet = fleet
        self.names = names
        self.plans = [layout(rank, len(names), shared) for rank in range(len(names))]
        self.arenas: list[Arena] = []
        self.generation = 1

    async def start(self, *more: str, slots: int = 3) -> None:
        for name in (*self.names, *more):
            await self.fleet.add(name)
        await self.launch(1, slots)

    async def launch(self, generation: int, slots: int = 3) -> None:
        """Begin a generation that takes up nothing."""
        self.generation = generation
        self.fleet.launch(generation, *self.names)
        pairs = zip(self.names, self.plans, strict=True)
        self.arenas = [await self.fleet.nodes[name].arena(plan, generation, slots) for name, plan in pairs]

    def save(self, *steps: int) -> None:
        for step in steps:
            for arena, plan in zip(self.arenas, self.plans, strict=True):
                save(arena, plan, step, self.generation)

    async def back_up(self, step: int, floor: int = -1) -> None:
        await self.fleet.aim(floor, step)
        self.save(step)
        await until(lambda: all(self.backed(name) == step for name in self.names))
        await self.fleet.aim(step, -1)

    def backed(self, name: str) -> int:
        return self.fleet.nodes[name].keeper.backing.backed

    def steps(self, rank: int) -> set[int]:
        return {one.step for one in self.arenas[rank].list_sealed()}


def backups(node: Node) -> set[tuple[int, int]]:
    """Ranks and steps that a node holds for others."""
    own = {one.arena.rank for one in node.keeper._arenas.list_arenas()}
    return {(copy.rank, copy.step) for copy in node.keeper.list_copies() if copy.rank not in own}
