"""The step that every rank and every peer holds: when it rises, and when it waits."""

from collections.abc import Callable

from holdfast.core.snapshots.disk_floor_coordination import DiskFloor, DiskLimits
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits, RecoveryFloor
from holdfast.model.job_and_seats import Seat
from holdfast.model.observation import Beat

LIMITS = BackupLimits(duty=0.5, stuck_s=60.0, verify_steps=10)
SEATS = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=i, nproc=1) for i in range(3))


def incomparable() -> None:
    """Nobody can say how far replicas are equal."""


def floor(limits: BackupLimits = LIMITS, equal: Callable[[], int | None] = incomparable) -> RecoveryFloor:
    made = RecoveryFloor(limits, equal, DiskFloor(DiskLimits()))
    made.on_launch(1, SEATS, ())
    return made


def tell(
    made: RecoveryFloor, now: float, *, sealed: int, backed: int = -1, took_s: float = 0.0, **more: object
) -> list[bool]:
    """Every node says the same."""
    told = {"node": "", "generation": 1, "step": sealed, "at": now, "sealed": sealed, "backed": backed} | more
    return [made.on_beat(now, Beat(**told | {"node": seat.node, "backing_s": took_s})) for seat in SEATS]  # type: ignore[arg-type]


def test_everybody_is_told_the_same_step_and_its_peer() -> None:
    made = floor()
    assert tell(made, 0.0, sealed=10) == [False, False, True], "when the last has spoken"
    aims = [made.aim_for(seat.node) for seat in SEATS]
    assert {(aim.floor, aim.next) for aim in aims} == {(-1, 11)}
    assert all(aim.peer in {"n0", "n1", "n2"} - {seat.node} for aim, seat in zip(aims, SEATS, strict=True))


def test_every_keeper_is_told_whose_copies_it_keeps() -> None:
    for made in (floor(), floor(BackupLimits(parity=True)), floor(BackupLimits(copies=2))):
        for seat in SEATS:
            aim = made.aim_for(seat.node)
            for keeper in {half.keeper for half in aim.halves} or {aim.peer, aim.second} - {""}:
                assert seat in made.aim_for(keeper).wards
        assert not any(seat in made.aim_for(seat.node).wards for seat in SEATS)
    assert floor(BackupLimits(enabled=False)).aim_for("n0").wards == ()


def test_the_floor_rises_when_the_last_has_it() -> None:
    made = floor()
    tell(made, 0.0, sealed=10)
    assert tell(made, 1.0, sealed=11, backed=11) == [False, False, True]
    assert (made.floor, made.aim_for("n0").next) == (11, 12), "and the next is aimed at, as the copy took no time"


def test_steps_that_are_not_saved_do_not_count() -> None:
    made = floor()
    tell(made, 0.0, sealed=10)
    tell(made, 1.0, sealed=20, backed=20)
    assert made.floor == 20


def test_a_copy_that_took_long_is_paid_for_by_a_pause() -> None:
    made = floor()
    tell(made, 0.0, sealed=10)
    tell(made, 4.0, sealed=11, backed=11, took_s=4.0)
    assert made.aim_for("n0").next == -1
    assert not made.tick(7.9)
    assert made.tick(8.0) and made.aim_for("n0").next == 12


def test_nobody_aims_further_ahead_than_some_seconds() -> None:
    """Nodes that miss the step for another reason than that they hear of it late do so from afar too."""
    made = floor()
    tell(made, 0.0, sealed=10)
    step = 10
    for now in range(1, 100):
        step += 2
        for number, seat in enumerate(SEATS):
            beat = Beat(node=seat.node, generation=1, step=step, at=now, sealed=step, backed=step - number % 2)
            made.on_beat(float(now), beat)
    assert made.aim_for("n0").next - step <= 10


def test_copies_that_do_not_keep_up_are_told_until_they_do() -> None:
    made = floor()
    tell(made, 0.0, sealed=10)
    tell(made, 1.0, sealed=11, backed=11)
    for now in range(2, 61):
        tell(made, float(now), sealed=11 + now, backed=11)
    assert made.floor == 11 and not made.behind
    tell(made, 61.0, sealed=80, backed=11)
    assert made.behind.startswith("copies on peers do not keep up: they are of step 11, the job is at step 80; missing")
    tell(made, 62.0, sealed=90, backed=90)
    assert made.floor == 90 and not made.behind


def test_few_slow_steps_are_not_behind() -> None:
    made = floor()
    tell(made, 0.0, sealed=10)
    tell(made, 500.0, sealed=14)
    assert not made.behind


def test_who_heard_too_late_makes_all_look_further_ahead() -> None:
    made = floor()
    tell(made, 0.0, sealed=10)
    told = [
        made.on_beat(1.0, Beat(node=seat.node, generation=1, step=12, at=1.0, sealed=12, backed=11 + number // 2))
        for number, seat in enumerate(SEATS)
    ]
    assert told == [False, False, True] and made.floor == -1
    assert made.aim_for("n0").next == 14
    tell(made, 2.0, sealed=14, backed=14)
    assert (made.floor, made.aim_for("n0").next) == (14, 16)


def test_it_looks_less_far_ahead_when_all_goes_well() -> None:
    made = floor()
    made._ahead = 4
    for turn in range(9):
        tell(made, float(turn), sealed=10 * turn, backed=made.aim_for("n0").next)
    assert made._ahead == 3


def test_a_copy_that_does_not_arrive_is_given_up() -> None:
    made = floor()
    tell(made, 0.0, sealed=10)
    assert tell(made, 59.0, sealed=50) == [False] * 3
    assert True in tell(made, 60.0, sealed=51)
    assert made.aim_for("n0").next == 52


def test_a_node_without_snapshots_holds_up_all() -> None:
    made = floor()
    tell(made, 0.0, sealed=10)
    assert not made.on_beat(1.0, Beat(node="n1", generation=1, step=11, at=1.0))
    assert made.floor == -1 and not made.tick(100.0)


def test_copies_that_tell_how_long_to_rest_are_believed() -> None:
    """Sent in gaps, they take most of a step, and send for a part of that."""
    made = floor()
    tell(made, 0.0, sealed=10)
    assert tell(made, 1.0, sealed=11, backed=11, took_s=5.0, backing_rest_s=0.0) == [False, False, True]
    assert made.aim_for("n0").next == 12
    tell(made, 2.0, sealed=12, backed=12, took_s=0.0, backing_rest_s=3.0)
    assert made.aim_for("n0").next == -1 and not made.tick(4.9)
    assert made.tick(5.0) and made.aim_for("n0").next == 13


def test_how_copies_are_paced_and_how_old_they_are() -> None:
    made = floor()
    assert (made.pacing, made.age_steps) == ("", -1)
    tell(made, 0.0, sealed=10)
    tell(made, 1.0, sealed=11, backed=11, pacing="gaps")
    assert (made.pacing, made.age_steps) == ("gaps", 0)
    made.on_beat(1.5, Beat(node="n1", generation=1, step=13, at=1.5, sealed=13, backed=11, pacing="duty: steps vary"))
    assert (made.pacing, made.age_steps) == ("duty: steps vary", 2), "one node is enough"


def test_a_floor_is_verified_some_steps_later() -> None:
    made = floor(BackupLimits(duty=0.01, verify_steps=10))
    tell(made, 0.0, sealed=10)
    tell(made, 1.0, sealed=11, backed=11, took_s=60.0)
    tell(made, 2.0, sealed=20, backed=11)
    assert made.verified == -1
    assert tell(made, 3.0, sealed=21, backed=11) == [False, False, True]
    assert made.aim_for("n1").verified == 11


def test_no_state_is_verified_that_led_to_nan() -> None:
    made = floor(BackupLimits(duty=0.01))
    tell(made, 0.0, sealed=10)
    tell(made, 1.0, sealed=11, backed=11, took_s=60.0)
    tell(made, 3.0, sealed=21, backed=11, loss=float("nan"))
    assert made.verified == -1


def test_where_a_verified_state_is_kept_no_floor_is_left_before_the_next_is_verified() -> None:
    made = floor()
    tell(made, 0.0, sealed=10, verifies=True)
    assert made.aim_for("n0").next == 11
    tell(made, 1.0, sealed=11, backed=11, verifies=True)
    assert (made.floor, made.aim_for("n0").next) == (11, -1)
    tell(made, 2.0, sealed=21, backed=11, verifies=True)
    assert made.verified == 11
    made.tick(2.5)
    assert made.aim_for("n0").next == 22


def test_a_new_generation_starts_over() -> None:
    made = floor()
    tell(made, 0.0, sealed=10)
    tell(made, 1.0, sealed=11, backed=11)
    made.on_launch(2, SEATS, ())
    assert (made.floor, made.aim_for("n0").next, made.aim_for("n0").generation) == (-1, -1, 2)
    assert tell(made, 2.0, sealed=12) == [False] * 3, "beats of the old generation"


def test_told_not_to() -> None:
    made = RecoveryFloor(BackupLimits(enabled=False), incomparable, DiskFloor(DiskLimits()))
    assert made.on_launch(1, SEATS, ()) == () and made.peers == {}


def test_what_a_placement_does_not_survive_is_told() -> None:
    seats = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=2 * i, nproc=2) for i in range(4))
    made = RecoveryFloor(LIMITS, incomparable, DiskFloor(DiskLimits()))
    assert made.on_launch(1, seats, (("pp", 4), ("dp", 2))) == (), "a group over all nodes is evicted by nobody"
    assert made.on_launch(1, seats, (("pp", 2), ("dp", 2), ("tp", 2))) == ()
    assert made.peers == {"n0": "n3", "n3": "n0", "n1": "n2", "n2": "n1"}
    assert made.on_launch(1, seats, (("dp", 3), ("tp", 2))) == (), "a mesh of another size tells nothing"


def test_with_parity_it_rises_when_all_is_sealed() -> None:
    made = floor(BackupLimits(duty=0.5, parity=True))
    aims = [made.aim_for(seat.node) for seat in SEATS]
    assert all(aim.peer == aim.halves[0].keeper != aim.halves[1].keeper for aim in aims)
    tell(made, 0.0, sealed=10)
    assert tell(made, 1.0, sealed=11, backed=11, kept=-1) == [False] * 3 and made.floor == -1, "sent, and not sealed"
    assert tell(made, 2.0, sealed=12, backed=11, kept=11) == [False, False, True] and made.floor == 11


def test_parity_that_is_never_sealed_is_given_up() -> None:
    made = floor(BackupLimits(stuck_s=60.0, parity=True))
    tell(made, 0.0, sealed=10)
    tell(made, 59.0, sealed=50, backed=11)
    assert made.aim_for("n0").next == 11
    assert True in tell(made, 60.0, sealed=51, backed=11)
    assert (made.floor, made.aim_for("n0").next) == (-1, 52)


def test_where_parity_does_not_fit_copies_are_whole_and_it_is_said() -> None:
    made = RecoveryFloor(BackupLimits(parity=True), incomparable, DiskFloor(DiskLimits()))
    [why] = made.on_launch(1, SEATS[:2], ())
    assert "it takes 3 nodes" in why
    assert made.peers == {"n0": "n1", "n1": "n0"} and made.aim_for("n0").halves == ()
    assert made.on_launch(2, SEATS, ()) == () and made.aim_for("n0").halves


def test_with_two_copies_everybody_has_two_peers() -> None:
    made = floor(BackupLimits(copies=2))
    for seat in SEATS:
        aim = made.aim_for(seat.node)
        assert {seat.node, aim.peer, aim.second} == {"n0", "n1", "n2"} and not aim.halves
    assert not made.on_launch(2, SEATS, ())
    [why] = made.on_launch(3, SEATS[:2], ())
    assert why and made.aim_for("n0").peer == "n1" and not made.aim_for("n0").second


def test_states_with_one_copy_instead_of_two_are_told_until_there_are_two() -> None:
    made = floor(BackupLimits(copies=2))
    tell(made, 0.0, sealed=10)
    absent = {"n0": "n1", "n1": "", "n2": "n1"}
    for seat in SEATS:
        at = Beat(node=seat.node, generation=1, step=11, at=1.0, sealed=11, backed=11, absent=absent[seat.node])
        made.on_beat(1.0, at)
    assert (made.floor, made.copies) == (11, 1), "it is not waited for"
    assert all(node in made.lone for node in absent)
    tell(made, 2.0, sealed=12, backed=12)
    assert (made.floor, made.copies) == (12, 2) and not made.lone


def test_a_floor_waits_until_replicas_are_known_to_be_equal() -> None:
    equal = [-1]
    made = floor(equal=lambda: equal[0])
    tell(made, 0.0, sealed=10, compares=True)
    assert not any(tell(made, 1.0, sealed=12, backed=11, compares=True)) and made.floor == -1
    equal[0] = 11
    assert made.tick(2.0) and made.floor == 11


def test_a_floor_that_is_never_compared_is_given_up_for_a_newer_one() -> None:
    made = floor(equal=lambda: -1)
    tell(made, 0.0, sealed=10, compares=True)
    tell(made, 1.0, sealed=20, backed=11, compares=True)
    assert made.tick(61.0) and (made.floor, made.aim_for("n0").next) == (-1, 21)


def test_nobody_waits_where_nothing_is_compared_or_nothing_can_be() -> None:
    made = floor(equal=lambda: -1)
    tell(made, 0.0, sealed=10)
    tell(made, 1.0, sealed=11, backed=11)
    assert made.floor == 11
    other = floor(equal=incomparable)
    tell(other, 0.0, sealed=10, compares=True)
    tell(other, 1.0, sealed=11, backed=11, compares=True)
    assert other.floor == 11
