"""What a keeper takes from a launch: whom it serves, where states come from, and what is dropped."""

import msgspec

from holdfast.core.snapshots.keeper_launch import leave_line, read_launch
from holdfast.model.errand import LaunchHere
from holdfast.model.job_and_seats import Seat
from holdfast.model.state_copy import Doubt, Restore, Source

OWN = Source(rank=2, own=True, nodes=("n1",))
LAUNCH = LaunchHere(
    id=1,
    generation=3,
    seat=Seat(node="n1", group_rank=1, first_rank=2, nproc=2),
    world_size=4,
    group_world_size=2,
    store_host="h",
    store_port=1,
    run_id="r",
    max_restarts=0,
    restore=Restore(step=7, sources=(OWN,)),
)


def test_ranks_are_served_in_their_generation_alone() -> None:
    launch = read_launch(LAUNCH)
    assert launch.ranks == (2, 3) and launch.refuse_request(3) == ""
    assert launch.refuse_request(2) == "generation 2 is over; the node runs 3"
    assert launch.find_source(2) == OWN and launch.find_source(3) is None


def test_what_is_held_is_of_the_line_up_to_the_restored_step() -> None:
    assert read_launch(LAUNCH).shared_step == 7
    assert read_launch(msgspec.structs.replace(LAUNCH, astray=True)).shared_step == -1, "others made step 7 anew"
    assert read_launch(msgspec.structs.replace(LAUNCH, restore=Restore(step=7))).shared_step == -1, "from storage"


def test_which_states_on_disk_a_launch_gives_up() -> None:
    """A node that was away keeps its own, which tell their generation."""
    doubts = (Doubt(generation=2, not_after=9),)
    astray = msgspec.structs.replace(LAUNCH, astray=True)
    doubted = msgspec.structs.replace(LAUNCH, restore=Restore(doubts=doubts))
    for launch, given_up in (
        (LAUNCH, [(2, 8), (2, 10)]),
        (astray, [(2, 8), (2, 10)]),
        (msgspec.structs.replace(LAUNCH, restore=Restore(step=7)), []),  # from storage, which may fail
        (doubted, [(1, 10), (2, 10)]),
    ):
        told = read_launch(launch)
        assert [(g, s) for g in (1, 2) for s in (7, 8, 10) if told.gives_up(g, s)] == given_up


def test_lines_that_were_left() -> None:
    left: tuple[Doubt, ...] = ()
    for generation, step in ((1, -1), (2, 50), (3, 80), (4, 60)):
        left = leave_line(left, generation, step)
    assert [(one.generation, one.not_after) for one in left] == [(0, -1), (1, 50), (3, 60)]
    states = [(1, 50), (1, 51), (2, 55), (2, 61), (3, 60), (3, 61), (4, 99)]
    good = [state for state in states if not any(one.bans_state(*state) for one in left)]
    assert good == [(1, 50), (2, 55), (3, 60), (4, 99)]


def test_a_long_list_of_lines_bans_more_not_less() -> None:
    left: tuple[Doubt, ...] = ()
    every: list[Doubt] = []
    for generation in range(1, 200):
        left = leave_line(left, generation, 10 * generation)
        every.append(Doubt(generation=generation - 1, not_after=10 * generation))
    assert len(left) <= 64
    for generation in range(200):
        for step in (10 * generation, 10 * generation + 9, 10 * generation + 11):
            banned = any(one.bans_state(generation, step) for one in every)
            assert not banned or any(one.bans_state(generation, step) for one in left)
    assert not any(one.bans_state(198, 1985) for one in left)
