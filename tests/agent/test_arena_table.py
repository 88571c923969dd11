"""The table of arenas: what it finds, what it pins, and what stays pinned when a rank gets other memory."""

from pathlib import Path

import pytest

from holdfast.agent.snapshots.arena_table import ArenaTable, OwnArena, pin_snapshot
from holdfast.checkpoint.arena import VERIFIED, Arena
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch

SLOTS = 3


class Scene:
    """A table with the arena of rank 4."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = ArenaTable()
        self.own = self.replace()

    def replace(self) -> OwnArena:
        path = str(self.folder / f"arena-{len(list(self.folder.iterdir()))}")
        return self.table.put_arena(path, Arena.make(path, layout=bytes(32), image_bytes=64, slots=SLOTS, rank=4))

    def save(self, *steps: int) -> None:
        for step in steps:
            slot = self.own.arena.begin_slot(step, 1)
            assert slot
            slot.image[:] = bytes([step]) * 64
            slot.seal()

    def steps(self) -> list[int]:
        return [one.step for one in self.table.list_snapshots()]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_what_is_pinned_is_not_overwritten(scene: Scene) -> None:
    scene.save(1, 2)
    first = scene.table.list_snapshots()[-1]
    assert scene.table.pin_own(first, spare=True)
    scene.save(3, 4, 5)
    assert scene.steps() == [5, 4, 1] and bytes(scene.table.read_pinned(first)) == bytes([1]) * 64
    scene.table.unpin_own(first)
    scene.save(6)
    assert scene.steps() == [6, 5, 4] and scene.own.arena.count_pinned() == 0
    assert not scene.table.pin_own(first, spare=False), "it is gone"


def test_a_slot_that_the_rank_needs_is_not_spared(scene: Scene) -> None:
    scene.save(1, 2, 3)
    newest, middle, oldest = scene.table.list_snapshots()
    assert scene.table.pin_own(oldest, spare=True) and scene.table.pin_own(middle, spare=True)
    assert not scene.table.pin_own(newest, spare=True)
    assert scene.table.pin_own(newest, spare=False), "the floor is held whatever it costs"


def test_a_rank_that_gets_other_memory(scene: Scene) -> None:
    scene.save(1)
    before, [one] = scene.own, scene.table.list_snapshots()
    assert scene.table.pin_own(one, spare=False)
    scene.own = scene.replace()
    scene.save(1)
    assert scene.table.list_snapshots()[0] != one, "another snapshot, of the same step and seq"
    assert bytes(scene.table.read_pinned(one)) == bytes([1]) * 64 and before.arena.count_pinned() == 1
    assert not scene.table.pin_own(one, spare=False)
    scene.table.unpin_own(one)
    assert before.arena.count_pinned() == 0 == scene.own.arena.count_pinned()


def test_flags_and_drops_reach_the_memory(scene: Scene) -> None:
    scene.save(1, 2)
    scene.table.mark_verified(scene.table.list_snapshots()[0])
    assert [one.flags for one in scene.own.arena.list_sealed()] == [VERIFIED, 0]
    scene.table.drop_left(KeeperLaunch(generation=2, shared_step=1))
    assert scene.steps() == [1]


def test_what_the_holder_kept_is_adopted(scene: Scene) -> None:
    scene.save(7)
    table = ArenaTable()
    table.put_arena(scene.own.path, Arena.open(scene.own.path))
    assert [(one.rank, one.step) for one in table.list_snapshots()] == [(4, 7)] and table.count_slots(4) == SLOTS
    assert table.find_arena(5) is None and table.count_slots(5) == 0


def test_a_pin_is_released_once(scene: Scene) -> None:
    scene.save(1)
    arena, [sealed] = scene.own.arena, scene.own.arena.list_sealed()
    one, two = pin_snapshot(arena, sealed), pin_snapshot(arena, sealed)
    assert one and two
    one.release()
    one.release()
    assert arena.count_pinned() == 1, "the other reader's"
    two.release()
    assert arena.count_pinned() == 0
    arena.drop(sealed.slot)
    assert pin_snapshot(arena, sealed) is None
