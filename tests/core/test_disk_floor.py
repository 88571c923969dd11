"""Which floors go to the disks of all nodes, and which of them are kept."""

from holdfast.core.snapshots.disk_floor import DiskFloor, DiskLimits
from holdfast.model.observation import Beat

LIMITS = DiskLimits(path="/disk", every_s=60.0, keep=2)


def beats(*told: tuple[int, int]) -> list[Beat]:
    """What nodes tell: the newest floor on disk, and the newest that they tried."""
    return [
        Beat(node=f"n{i}", generation=1, step=99, at=0.0, disked=written, disk_tried=tried)
        for i, (written, tried) in enumerate(told)
    ]


def written(floor: DiskFloor, now: float, step: int) -> None:
    """Both nodes are told of a floor, and write it."""
    assert floor.tick(now, step, beats((-1, -1), (-1, -1))) and floor.aim == step
    assert floor.tick(now + 1, step, beats((step, step), (step, step))) and floor.aim == -1


def test_without_a_path_nothing_is_written() -> None:
    floor = DiskFloor(DiskLimits())
    assert not floor.tick(0.0, 7, beats((-1, -1))) and floor.aim == -1


def test_a_floor_counts_when_the_last_disk_has_it() -> None:
    floor = DiskFloor(LIMITS)
    assert floor.tick(0.0, 7, beats((-1, -1), (-1, -1))) and floor.aim == 7
    assert not floor.tick(1.0, 9, beats((7, 7), (-1, -1))), "one at a time"
    assert (floor.aim, floor.newest_kept) == (7, -1)
    assert floor.tick(2.0, 9, beats((7, 7), (7, 7)))
    assert (floor.aim, floor.newest_kept, floor.oldest_kept) == (-1, 7, -1)


def test_the_next_floor_waits_for_its_time() -> None:
    floor = DiskFloor(LIMITS)
    written(floor, 0.0, 7)
    told = beats((7, 7), (7, 7))
    assert not floor.tick(59.0, 50, told)
    assert not floor.tick(61.0, 7, told), "no newer floor"
    assert floor.tick(62.0, 50, told) and floor.aim == 50


def test_a_disk_that_fails_costs_no_older_state() -> None:
    floor = DiskFloor(LIMITS)
    for number, step in enumerate((7, 17, 27)):
        written(floor, 100.0 * number, step)
    assert (floor.oldest_kept, floor.newest_kept) == (17, 27)
    assert floor.tick(400.0, 37, beats((27, 27), (27, 27)))
    assert floor.tick(401.0, 38, beats((37, 37), (27, 37))), "the second could not write it"
    assert (floor.aim, floor.oldest_kept, floor.newest_kept) == (-1, 17, 27)


def test_a_later_launch_keeps_what_is_of_its_line() -> None:
    floor = DiskFloor(LIMITS)
    for number, step in enumerate((7, 17)):
        written(floor, 100.0 * number, step)
    assert floor.tick(300.0, 27, beats((17, 17), (17, 17)))
    floor.on_launch()
    floor.drop_after(10)
    assert (floor.aim, floor.newest_kept, floor.oldest_kept) == (-1, 7, -1), (
        "older ones stay until two are on all disks"
    )
    written(floor, 400.0, 12)
    assert (floor.oldest_kept, floor.newest_kept) == (7, 12)
