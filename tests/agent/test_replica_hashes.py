"""Hashes of snapshots: of what replicas share and nothing else, at the steps that matter, never of a torn one."""

import asyncio
from pathlib import Path

import msgspec

from holdfast.agent.snapshots.arena_table import ArenaTable
from holdfast.agent.snapshots.keeper_note_folder import KeeperNoteFolder
from holdfast.agent.snapshots.replica_hashes import ReplicaHasher, hash_part, shared_parts
from holdfast.checkpoint.arena import Arena, SealedSnapshot
from holdfast.checkpoint.image_layout import ImageLayout, RecordSpec, arrange_image
from holdfast.checkpoint.keeper_client import make_want
from holdfast.core.detect.replica import ReplicaLimits
from holdfast.model.observation import Mark
from holdfast.wire.rank_keeper_messages import layout_file_name


def spec(key: str, replicas: tuple[int, ...], dtype: str = "float32", alike: bool = True) -> RecordSpec:
    shape = (100,) if dtype else ()
    named = {"key": key, "path": tuple(key.split(".")), "bytes": 400, "dtype": dtype, "alike": alike}
    where = {"shape": shape, "whole": shape, "start": (0,) if dtype else ()}
    return RecordSpec(**named, **where, group=(0, 1), replicas=replicas)  # type: ignore[arg-type]


SPECS = [
    spec("model.weight", (0, 1)),
    spec("optimizer.state.weight.exp_avg", (0, 1)),
    spec("optimizer.lr", (0, 1), dtype=""),
    spec("model.running_mean", (0, 1), alike=False),
    spec("model.own", (0,)),
]


def layout(rank: int = 0) -> ImageLayout:
    return arrange_image(SPECS, lambda one: (64, 64 + one.bytes), rank=rank, world=2)


class Scene:
    """A rank's arena, and the hashing of it."""

    def __init__(self, folder: Path, every: int = 10) -> None:
        self.layout = layout()
        sizes = {"layout": self.layout.digest, "image_bytes": self.layout.image_bytes, "slots": 4}
        self.arena = Arena.make(str(folder / "arena"), rank=0, world=2, **sizes)  # type: ignore[arg-type]
        want = make_want(self.layout, 4, "", None)
        (folder / layout_file_name(0, want.layout)).write_bytes(msgspec.msgpack.encode(self.layout))
        arenas = ArenaTable()
        arenas.put_arena("", self.arena)
        self.told: list[Mark] = []
        self.next_floor: dict[int, int] = {}
        self._more = asyncio.Event()
        self.hashing = ReplicaHasher(
            arenas, KeeperNoteFolder(folder), ReplicaLimits(every=every), self._tell, next_floor=lambda: self.next_floor
        )
        self.hashing.begin_generation(1)
        self.hashing.on_want(want)

    def save(self, step: int, generation: int = 1, fill: int = 0) -> SealedSnapshot:
        slot = self.arena.begin_slot(step, generation)
        assert slot
        slot.image[:] = bytes([fill]) * len(slot.image)
        slot.seal()
        return self.arena.list_sealed()[0]

    def _tell(self, marks: tuple[Mark, ...]) -> None:
        self.told.extend(marks)
        self._more.set()

    async def run(self, until: int) -> None:
        """Until so many marks were told."""
        task = asyncio.create_task(self.hashing.run())
        async with asyncio.timeout(120):
            while len(self.told) < until:
                self._more.clear()
                await self._more.wait()
        task.cancel()


def test_parts_are_what_replicas_share() -> None:
    parts = shared_parts(layout())
    assert [(part.name, part.count) for part in parts] == [("parameters", 2), ("optimizer state", 2)]
    assert [part.group for part in parts] == [part.group for part in shared_parts(layout(1))], (
        "the same on every replica"
    )
    assert all(sum(end - start for start, end in part.ranges) == 400 for part in parts)


def test_any_shared_bit_counts_and_no_other() -> None:
    plan = layout()
    image = bytearray(plan.image_bytes)
    before = [hash_part(memoryview(image), part) for part in shared_parts(plan)]
    for item in plan.items:
        image[item.payload + 3] ^= 1
        shared = item.spec.replicas == (0, 1) and item.spec.alike and item.spec.dtype
        now = [hash_part(memoryview(image), part) for part in shared_parts(plan)]
        assert sum(a != b for a, b in zip(before, now, strict=True)) == bool(shared), item.spec.key
        image[item.payload + 3] ^= 1
    image[plan.items[0].offset] ^= 1  # what torch puts around a payload
    assert [hash_part(memoryview(image), part) for part in shared_parts(plan)] == before


async def test_every_tenth_step_is_hashed_and_where_it_went_on_from(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.save(7, generation=0)
    await scene.run(2)
    assert {mark.step for mark in scene.told} == {7}
    for step in (8, 9, 10, 11):
        scene.save(step)
    await scene.run(4)
    assert {mark.step for mark in scene.told} == {7, 10}
    assert scene.arena.count_pinned() == 0 and scene.hashing.is_comparing


async def test_what_is_to_be_the_floor_is_hashed_whatever_its_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    held = scene.save(13)
    scene.next_floor = {0: held.seq}
    await scene.run(2)
    assert {mark.step for mark in scene.told} == {13}


def test_a_snapshot_that_was_overwritten_is_not_told(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    one = scene.save(10)
    scene.arena.drop(one.slot)
    assert scene.hashing._hash_snapshot(scene.arena, one) == ()


def test_zero_turns_it_off(tmp_path: Path) -> None:
    scene = Scene(tmp_path, every=0)
    assert not scene.hashing.is_comparing


def test_a_costly_hash_is_taken_less_often(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.hashing._cost_s = 1.0
    for step, at in ((1, 100.0), (11, 101.0)):
        sealed = SealedSnapshot(slot=0, seq=2 * step, step=step, generation=1, flags=0, at=at)
        scene.hashing._adjust_stride((sealed,))
    assert scene.hashing.stride == 5120
