"""Which floors go to the disks of all nodes, and which of them are kept."""

from holdfast.core.snapshots.disk_floor_coordination import DiskFloor, DiskLimits
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
    assert floor.missed == "step 37 is not on the disks of all nodes: n1 could not write it"
    written(floor, 500.0, 47)
    assert floor.missed == ""


def test_a_later_launch_counts_what_the_disks_of_its_nodes_hold() -> None:
    floor = DiskFloor(LIMITS)
    for number, step in enumerate((7, 17)):
        written(floor, 100.0 * number, step)
    assert floor.tick(300.0, 27, beats((17, 17), (17, 17)))
    floor.on_launch()
    floor.hold_steps({7})
    assert (floor.aim, floor.newest_kept, floor.oldest_kept) == (-1, 7, 7), "17 is on some disks only, if at all"
    written(floor, 400.0, 12)
    assert (floor.oldest_kept, floor.newest_kept) == (7, 12)


def test_where_a_new_node_has_nothing_the_next_step_takes_the_place_of_all_before() -> None:
    """Or disks that have room for one step more than they keep would never take another."""
    floor = DiskFloor(LIMITS)
    for number, step in enumerate((7, 17)):
        written(floor, 100.0 * number, step)
    floor.on_launch()
    floor.hold_steps(())
    assert (floor.newest_kept, floor.oldest_kept) == (-1, -1)
    written(floor, 400.0, 27)
    assert (floor.newest_kept, floor.oldest_kept) == (27, 27)


def test_a_controller_that_comes_back_amid_training_knows_not_what_disks_hold() -> None:
    floor = DiskFloor(LIMITS)
    written(floor, 0.0, 7)
    assert floor.oldest_kept == -1
    written(floor, 100.0, 17)
    assert floor.oldest_kept == 7
