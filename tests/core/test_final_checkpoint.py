"""What goes to storage at the end of a job."""

import msgspec

from holdfast.core.snapshots.final_checkpoint import choose_final, describe_doubt, storage_time_s
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import FinalState
from holdfast.model.state_copy import Copy

SEATS = tuple(Seat(node=f"n{rank}", group_rank=rank, first_rank=rank, nproc=1) for rank in (0, 1))


def copy(rank: int, step: int, *, whole: bool = True, verified: bool = False, poisoned: bool = False) -> Copy:
    made = Copy(rank=rank, step=step, node=f"n{rank}", layout="l", world=2, whole=whole)
    return msgspec.structs.replace(made, verified=verified, poisoned=poisoned)


def test_the_newest_step_that_all_ranks_hold() -> None:
    held = {"n0": (copy(0, 126), copy(0, 125)), "n1": (copy(1, 125), copy(1, 124))}
    assert choose_final(held, SEATS, 120, None) == {
        n: (FinalState(step=125, ranks=(r,)),) for r, n in enumerate(("n0", "n1"))
    }


def test_what_is_on_storage_is_not_written_again() -> None:
    held = {"n0": (copy(0, 125),), "n1": (copy(1, 125),)}
    assert choose_final(held, SEATS, 125, None) == {} and choose_final(held, SEATS, 124, None)


def test_what_no_rank_of_some_node_holds_is_not_written() -> None:
    assert choose_final({"n0": (copy(0, 125),), "n1": ()}, SEATS, -1, None) == {}
    assert choose_final({"n0": (copy(0, 125),), "n1": (copy(1, 125, whole=False),)}, SEATS, -1, None) == {}
    assert choose_final({}, SEATS, -1, None) == {}


def test_a_copy_of_another_nodes_rank_is_not_what_that_node_writes() -> None:
    """As it is in the healthy case: both nodes hold the newest state of both ranks, and can write their own only."""
    kept = [msgspec.structs.replace(copy(rank, 125), node=f"n{1 - rank}") for rank in (0, 1)]
    held = {"n0": (copy(0, 125), kept[1]), "n1": (kept[0], copy(1, 125))}
    assert choose_final(held, SEATS, 120, None) == {
        f"n{rank}": (FinalState(step=125, ranks=(rank,)),) for rank in (0, 1)
    }
    held = {"n0": (copy(0, 126), copy(0, 125)), "n1": (msgspec.structs.replace(copy(0, 126), node="n1"), copy(1, 125))}
    assert choose_final(held, SEATS, 120, None)["n0"] == (FinalState(step=125, ranks=(0,)),)


def test_two_ranks_of_one_node() -> None:
    held = {"a": tuple(Copy(rank=r, step=7, node="a", layout="l", world=2, whole=True) for r in (1, 0))}
    assert choose_final(held, (Seat(node="a", group_rank=0, first_rank=0, nproc=2),), -1, None) == {
        "a": (FinalState(step=7, ranks=(0, 1)),)
    }


def test_state_in_doubt_goes_apart_and_a_good_one_goes_first() -> None:
    held = {f"n{r}": (copy(r, 41), copy(r, 40)) for r in (0, 1)}
    good, bad = FinalState(step=40, ranks=(0,)), FinalState(step=41, ranks=(0,), doubted=True)
    assert choose_final(held, SEATS, -1, 40)["n0"] == (good, bad)
    assert choose_final(held, SEATS, 40, 40)["n0"] == (bad,)
    assert choose_final(held, SEATS, -1, 41)["n0"] == (FinalState(step=41, ranks=(0,)),)
    assert choose_final(held, SEATS, -1, 39)["n0"] == (bad,)


def test_a_checkpoint_in_doubt_does_not_stand_for_the_good_state_before_it() -> None:
    held = {"n0": (copy(0, 14),), "n1": (copy(1, 14),)}
    assert choose_final(held, SEATS, 20, None) == {}
    assert set(choose_final(held, SEATS, 20, 15)) == {"n0", "n1"}


def test_where_only_verified_states_are_believed() -> None:
    held = {f"n{r}": (copy(r, 41), copy(r, 30, verified=True)) for r in (0, 1)}
    assert choose_final(held, SEATS, -1, 50, verified=True)["n1"] == (
        FinalState(step=30, ranks=(1,)),
        FinalState(step=41, ranks=(1,), doubted=True),
    )


def test_one_poisoned_rank_is_enough() -> None:
    held = {"n0": (copy(0, 41, poisoned=True),), "n1": (copy(1, 41),)}
    assert choose_final(held, SEATS, -1, None)["n1"] == (FinalState(step=41, ranks=(1,), doubted=True),)


def test_ranks_that_are_slow_to_end_leave_storage_its_half() -> None:
    assert storage_time_s(30, 1) == 29 and storage_time_s(30, 29) == 15


def test_it_is_said_which_states_are_in_doubt_and_where_the_newest_go() -> None:
    held = {f"n{r}": (copy(r, 41), copy(r, 40)) for r in (0, 1)}
    assert describe_doubt(choose_final(held, SEATS, -1, 40), 40) == (
        "states after step 40 are in doubt; step 40, the newest good one, goes to storage;"
        " step 41 goes to storage apart from the others"
    )
    assert describe_doubt(choose_final(held, SEATS, -1, -1, verified=True), -1) == (
        "all states since the newest launch are in doubt; no newer good one is in memory;"
        " step 41 goes to storage apart from the others"
    )
