"""The newest state of another number of ranks of which everything is held, and why a newer one cannot be cut anew."""

import msgspec
import pytest

from holdfast.core.snapshots.recut_choice import choose_recut
from holdfast.model.job_and_seats import Seat
from holdfast.model.restore_sources import LaunchOrigin, Restore, Source
from holdfast.model.state_copy import Copy

SEATS = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=i, nproc=1) for i in range(2))
LINE = (LaunchOrigin(generation=1, stepped=True),)
NOTHING = Restore(reason="nothing")


def held(rank: int, step: int, node: str = "", *, world: int = 3, whole: bool = True, generation: int = 1) -> Copy:
    own = Copy(rank=rank, step=step, node=node or f"n{rank}", layout="l", world=world, whole=whole)
    return msgspec.structs.replace(own, generation=generation, cuts=(rank, 1, 1))


def choose(*copies: Copy, other: Restore = NOTHING, not_after: int | None = None) -> Restore:
    return choose_recut(SEATS, copies, not_after, LINE, other)


def test_what_a_lost_node_had_is_in_a_backup() -> None:
    copies = [held(0, 8), held(1, 8), held(2, 8, "n1", whole=False), held(0, 9), held(1, 9)]
    plan = choose(*copies)
    assert (plan.step, plan.cut_from, plan.maker, plan.sources, plan.uncut) == (8, 3, 1, (), "") and plan.is_held
    assert {(one.rank, one.node, one.whole) for one in plan.kept} == {
        (0, "n0", True),
        (1, "n1", True),
        (2, "n1", False),
    }
    assert plan.reason == "restoring step 8, which 3 ranks have saved: it is cut anew for 2"
    lacks = choose(*copies[:2], *copies[3:])
    assert not lacks.is_held and lacks.reason == "nothing"
    assert (
        lacks.uncut == "step 9 in memory was saved by 3 ranks and cannot be cut anew for 2: nothing is held of rank 2"
    )


def test_a_replica_stands_for_a_rank_of_which_nothing_is_held() -> None:
    pairs = {rank: msgspec.structs.replace(held(rank, 5, world=4), cuts=(rank % 2, 2, 2)) for rank in range(4)}
    assert choose(pairs[0], pairs[3]).step == 5
    assert not choose(pairs[0], pairs[2]).is_held
    backup = msgspec.structs.replace(pairs[3], whole=False)
    assert choose(pairs[0], backup).uncut.endswith("nothing is held of rank 1"), "a backup has what its rank owned"
    endless = msgspec.structs.replace(pairs[3], cuts=(1, 0, 1 << 50))
    assert choose(pairs[0], endless).uncut.endswith("nothing is held of rank 1")


def test_a_world_of_the_same_size_or_of_a_size_that_nobody_has_is_not_cut() -> None:
    assert choose(held(0, 5, world=2), held(1, 5, world=2)) is NOTHING
    assert choose(held(0, 5, world=1 << 40)) is NOTHING


def test_copies_that_led_to_nan_or_lie_on_disks_do_not_count() -> None:
    copies = [held(rank, 5, world=1) for rank in range(1)]
    assert choose(*copies).step == 5
    for bad in ({"poisoned": True}, {"disk": True}):
        assert choose(*(msgspec.structs.replace(copy, **bad) for copy in copies)) is NOTHING


def test_after_corruption_only_verified_steps_up_to_the_last_good_one() -> None:
    copies = [msgspec.structs.replace(held(r, s), verified=s < 9) for r in range(3) for s in (7, 8, 9)]
    assert choose(*copies, not_after=20).step == 8
    assert choose(*copies, not_after=7).step == 7
    assert choose(*copies, not_after=6) is NOTHING


def test_a_state_of_a_lineage_that_was_left_is_not_taken_and_lineages_are_not_mixed() -> None:
    line = (LaunchOrigin(generation=1, stepped=True), LaunchOrigin(generation=2, step=5, maker=1, stepped=True))
    old = [held(rank, 7) for rank in range(3)]
    plan = choose_recut(SEATS, [*old, *(held(rank, 5) for rank in range(3))], None, line, NOTHING)
    assert (plan.step, plan.maker) == (5, 1)
    mixed = [old[0], *(held(rank, 7, generation=2) for rank in (1, 2))]
    lacks = choose_recut(SEATS, mixed, None, line, NOTHING)
    assert not lacks.is_held and lacks.uncut.endswith("for 2: no lineage of the job has all of it")


@pytest.mark.parametrize(("step", "cut"), [(7, True), (8, False), (9, False)])
def test_a_state_that_need_not_be_cut_comes_first_unless_it_is_older(step: int, cut: bool) -> None:
    other = Restore(step=step, sources=(Source(rank=0, own=True),))
    plan = choose(*(held(rank, 8) for rank in range(3)), other=other)
    assert (plan is not other) == cut
    assert choose(*(held(rank, 8) for rank in range(2)), other=other) is other


def test_copies_whose_layout_is_not_known_are_told() -> None:
    copies = [held(0, 8), *(msgspec.structs.replace(held(rank, 8), cuts=None) for rank in (1, 2))]
    why = "the layout of what ranks 1-2 had is not recorded, or cannot be cut"
    assert choose(*copies).uncut == f"step 8 in memory was saved by 3 ranks and cannot be cut anew for 2: {why}"


def test_a_share_is_had_from_both_halves_of_its_parity() -> None:
    halves = [msgspec.structs.replace(held(2, 8, "n0", whole=False), half=half, beside=half) for half in (0, 1)]
    copies = [held(0, 8), held(1, 8)]
    assert choose(*copies, *halves).step == 8
    assert not choose(*copies, halves[0]).is_held
    assert not choose(copies[0], held(1, 8, whole=False), *halves).is_held, "rank 1 is not there to decode it with"
