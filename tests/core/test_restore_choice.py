"""The newest step that every rank can get, and from where."""

import msgspec

from holdfast.core.snapshots.restore_choice import (
    choose_known_restore,
    choose_replicated,
    choose_restore,
    count_disks,
    leave_out_disks,
)
from holdfast.model.job_and_seats import Seat
from holdfast.model.restore_sources import LaunchOrigin, Restore, Source
from holdfast.model.state_copy import Copy
from holdfast.model.state_doubt import Doubt

SEATS = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=i, nproc=1) for i in range(3))


def own(rank: int, step: int, node: str = "", **flags: bool) -> Copy:
    made = Copy(rank=rank, step=step, node=node or f"n{rank}", layout="l", world=3, whole=True)
    return msgspec.structs.replace(made, **flags)


def backup(rank: int, step: int, node: str, **flags: bool) -> Copy:
    made = Copy(rank=rank, step=step, node=node, layout="l", world=3, whole=False)
    return msgspec.structs.replace(made, **flags)


def test_nothing_held() -> None:
    plan = choose_restore(SEATS, ())
    assert (plan.step, plan.sources) == (0, ())
    assert plan.reason == "nothing to restore from memory: no snapshots are held"


def test_own_memory_of_the_newest_common_step() -> None:
    copies = [own(r, 10) for r in range(3)] + [own(r, 11) for r in range(2)]
    plan = choose_restore(SEATS, copies)
    assert plan.step == 10
    assert all(s.own for s in plan.sources)
    assert plan.reason == "restoring step 10: 3 from own memory"


def test_a_lost_node_is_restored_from_the_keeper_of_its_backup_and_from_replicas() -> None:
    copies = [own(0, 11), own(2, 11), backup(1, 11, "n2"), own(0, 12), own(2, 12)]
    seats = (SEATS[0], Seat(node="n9", group_rank=1, first_rank=1, nproc=1), SEATS[2])
    plan = choose_restore(seats, copies)
    assert plan.step == 11
    source = plan.sources[1]
    assert (source.own, source.nodes) == (False, ("n2",))
    assert {(c.rank, c.node) for c in plan.kept} == {(0, "n0"), (2, "n2"), (1, "n2")}
    assert plan.reason == "restoring step 11: 2 from own memory, 1 from peers"


def test_a_rank_that_moved_fetches_its_whole_snapshot() -> None:
    copies = [own(0, 5), own(1, 5, node="n2"), own(2, 5)]
    source = choose_restore(SEATS, copies).sources[1]
    assert (source.own, source.nodes) == (False, ("n2",))


def test_a_rank_without_any_copy() -> None:
    plan = choose_restore(SEATS, [own(0, 5), own(1, 5)])
    assert (plan.step, plan.sources) == (0, ())
    assert plan.reason == "nothing to restore from memory: no step is held for every rank"


def test_ranks_that_do_not_step_together_hold_no_step_in_common_and_that_is_said() -> None:
    copies = [own(0, 60), own(0, 59), own(1, 20), own(2, 20), own(2, 19)]
    plan = choose_restore(SEATS, copies)
    assert (plan.sources, plan.apart) == ((), "rank 0: step 60, ranks 1-2: step 20")
    assert not choose_restore(SEATS, copies[:3]).apart, "nothing of rank 2 is held at all"
    assert not choose_restore(SEATS, [*copies, own(0, 20)]).apart
    seats = tuple(Seat(node=f"n{i}", group_rank=i, first_rank=i, nproc=1) for i in range(6))
    many = [Copy(rank=r, step=9 - r, node=f"n{r}", layout="l", world=6, whole=True) for r in range(6)]
    assert choose_restore(seats, many).apart == "rank 0: step 9, rank 1: step 8, ..., rank 5: step 4"


def test_poisoned_copies_and_other_world_sizes_do_not_count() -> None:
    poisoned = [own(r, 7, poisoned=r == 1) for r in range(3)]
    older = [own(r, 6) for r in range(3)]
    elsewhere = [Copy(rank=r, step=9, node="n0", layout="l", world=4, whole=True) for r in range(3)]
    assert choose_restore(SEATS, poisoned + older + elsewhere).step == 6


def test_after_corruption_only_verified_steps_up_to_the_last_good_one() -> None:
    copies = [own(r, s, verified=s <= 8) for r in range(3) for s in (7, 8, 9)]
    assert choose_restore(SEATS, copies, not_after=8).step == 8
    assert choose_restore(SEATS, copies, not_after=7).step == 7
    assert choose_restore(SEATS, copies, not_after=6).step == 0


def half(rank: int, number: int, beside: int, node: str) -> Copy:
    return Copy(rank=rank, step=11, node=node, layout="l", world=3, whole=False, half=number, beside=beside)


LOST_1 = (SEATS[0], Seat(node="n9", group_rank=1, first_rank=1, nproc=1), SEATS[2])


def test_a_rank_is_had_from_parity_with_what_it_was_laid_over() -> None:
    halves = [half(1, 0, 2, "n0"), half(1, 1, 0, "n2")]
    plan = choose_restore(LOST_1, [own(0, 11), own(2, 11), *halves])
    assert plan.step == 11 and (plan.sources[1].own, plan.sources[1].nodes) == (False, ("n0", "n2"))
    assert {(k.half, k.beside, k.node) for k in plan.kept if k.rank == 1} == {(0, 2, "n0"), (1, 0, "n2")}


def test_one_half_is_nothing() -> None:
    assert not choose_restore(LOST_1, [own(0, 11), own(2, 11), half(1, 0, 2, "n0")]).sources


def test_parity_without_the_other_rank_is_nothing() -> None:
    """Which is there only as parity itself, or at another step."""
    halves = [half(1, 0, 2, "n0"), half(1, 1, 0, "n2")]
    assert not choose_restore(LOST_1, [own(0, 11), own(2, 12), backup(2, 11, "n0"), *halves]).sources


def test_a_whole_copy_is_better_than_parity() -> None:
    halves = [half(1, 0, 2, "n0"), half(1, 1, 0, "n2")]
    plan = choose_restore(LOST_1, [own(0, 11), own(2, 11), backup(1, 11, "n0"), *halves])
    assert plan.sources[1].nodes == ("n0",)


def disk(rank: int, step: int, node: str = "", generation: int = 1, **flags: bool) -> Copy:
    return msgspec.structs.replace(own(rank, step, node, **flags), disk=True, generation=generation)


def test_disks_serve_when_all_memory_is_lost() -> None:
    plan = choose_restore(SEATS, [disk(r, s) for r in range(3) for s in (5, 9)] + [disk(0, 12)])
    assert plan.step == 9 and all(source.disk and source.own for source in plan.sources)
    assert plan.reason == "restoring step 9: 3 from local disks"
    assert count_disks(plan) == 3


def test_memory_comes_before_disks_and_the_own_disk_before_others() -> None:
    copies = [own(0, 9), disk(0, 9, generation=0), backup(1, 9, "n2"), disk(1, 9), disk(2, 9, "n0"), disk(2, 9)]
    plan = choose_restore(SEATS, copies)
    assert [(s.own, s.disk, s.nodes) for s in plan.sources] == [
        (True, False, ("n0",)),
        (False, False, ("n2",)),
        (True, True, ("n2",)),
    ]
    assert plan.reason == "restoring step 9: 1 from own memory, 1 from peers, 1 from local disks"
    assert count_disks(plan) == 1
    assert len(plan.kept) == len(copies) - 1, "memory and disk of n0 hold the same"
    moved = choose_restore(SEATS, [own(0, 9), own(1, 9), disk(2, 9, "n0")])
    assert (moved.sources[2].own, moved.sources[2].nodes) == (False, ("n0",))


def test_the_newest_step_of_every_rank_decides_not_where_it_lies() -> None:
    copies = [own(r, 8) for r in range(3)] + [own(0, 9), disk(1, 9), disk(2, 9)]
    assert choose_restore(SEATS, copies).step == 9
    assert count_disks(choose_restore(SEATS, copies[:3])) == 0


def test_a_parity_half_is_told_apart_by_a_state_on_disk() -> None:
    halves = [
        Copy(rank=1, step=9, node="n2", layout="l", world=3, whole=False, half=0, beside=0),
        Copy(rank=1, step=9, node="n0", layout="l", world=3, whole=False, half=1, beside=2),
    ]
    source = choose_restore(SEATS, [disk(0, 9), disk(2, 9), *halves]).sources[1]
    assert (source.disk, source.nodes) == (False, ("n0", "n2"))


def test_disks_of_lines_that_were_left_and_in_doubt_do_not_count() -> None:
    left = (Doubt(generation=1, not_after=6), Doubt(generation=3, not_after=20))
    copies = [disk(0, 6, generation=1), disk(0, 7, generation=1), disk(0, 7, generation=2), disk(0, 21, generation=3)]
    assert leave_out_disks(copies, left) == [copies[0], copies[2]]
    assert leave_out_disks([own(0, 30)], left) == [own(0, 30)], "nodes drop what they hold in memory themselves"


def test_where_only_good_states_will_do_disks_must_be_verified() -> None:
    copies = [disk(r, s, verified=s == 5) for r in range(3) for s in (5, 9)]
    assert choose_restore(SEATS, copies, not_after=20).step == 5


def test_claims_of_unknown_nodes_count_only_if_known_ones_hold_nothing() -> None:
    claims = [own(r, 9, node="x", disk=True) for r in range(3)]
    known = [own(r, 5) for r in range(3)]
    nodes = {"n0", "n1", "n2"}
    assert choose_known_restore(SEATS, [*claims, *known], nodes).step == 5
    assert choose_known_restore(SEATS, [*claims, *known[:2]], nodes).step == 9, "after a blackout, hosts have new names"
    assert choose_known_restore(SEATS, [*claims, *known], {*nodes, "x"}).step == 9


LINE = (LaunchOrigin(generation=1, stepped=True),)


def whole(node: str, rank: int, step: int, world: int = 4, generation: int = 1) -> Copy:
    return Copy(rank=rank, step=step, node=node, layout="l", world=world, whole=True, generation=generation)


def test_a_state_that_is_whole_on_every_rank_is_restored_in_a_world_of_another_size() -> None:
    copies = [whole(node, rank, step) for node, rank in (("n0", 0), ("n2", 2)) for step in (8, 9)]
    copies.append(whole("n0", 0, 10))
    plan = choose_replicated(SEATS, copies, LINE, Restore())  # n1 is new and holds nothing
    assert (plan.step, plan.replicated, plan.sources, plan.maker) == (9, True, (), 1) and plan.is_held
    assert choose_replicated(SEATS, [*copies, whole("n1", 1, 8)], LINE, Restore()).step == 8, (
        "the newest that all of them hold"
    )
    assert not choose_replicated(SEATS, (), LINE, Restore()).is_held
    assert not choose_replicated(SEATS, [whole("n9", 3, 9)], LINE, Restore()).is_held, "nobody of the job holds it"


def test_of_a_node_with_several_ranks_each_must_hold_the_state_at_one_world_size() -> None:
    seats = (Seat(node="n0", group_rank=0, first_rank=0, nproc=2),)
    held = [whole("n0", 0, 9), whole("n0", 0, 9, world=2), whole("n0", 1, 8), whole("n0", 0, 8)]
    assert choose_replicated(seats, held, LINE, Restore()).step == 8
    assert choose_replicated(seats, [*held, whole("n0", 1, 9, world=2)], LINE, Restore()).step == 9


def test_whole_states_of_a_lineage_that_was_left_or_that_led_to_nan_do_not_count() -> None:
    line = (LaunchOrigin(generation=1, stepped=True), LaunchOrigin(generation=2, step=5, maker=1, stepped=True))
    copies = [whole("n0", 0, 7, generation=1), whole("n0", 0, 6, generation=2)]
    assert choose_replicated(SEATS, copies, line, Restore()).step == 6, "generation 2 went on from step 5"
    bad = msgspec.structs.replace(copies[1], poisoned=True)
    assert not choose_replicated(SEATS, [copies[0], bad], line, Restore()).is_held


def test_a_plan_for_each_rank_comes_first_unless_it_is_older() -> None:
    other = Restore(step=9, sources=(Source(rank=0, own=True),))
    assert choose_replicated(SEATS, [whole("n0", 0, 9)], LINE, other) is other
    assert choose_replicated(SEATS, [whole("n0", 0, 10)], LINE, other).replicated
