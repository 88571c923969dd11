"""What a keeper takes from a launch: whom it serves, where states come from, and what is dropped."""

import msgspec

from holdfast.core.snapshots.keeper_launch_state import read_launch
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import LaunchHere
from holdfast.model.restore_sources import LaunchOrigin, Restore, Source
from holdfast.model.state_doubt import Doubt

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


def test_of_what_is_held_only_states_of_its_line_are_kept() -> None:
    """Generation 3 resumes from step 7, which 1 made; 2 went on from storage, and its steps were not heard of."""
    line = (LaunchOrigin(generation=1), LaunchOrigin(generation=2), LaunchOrigin(generation=3, step=7, maker=1))
    told = read_launch(msgspec.structs.replace(LAUNCH, line=line))
    held = [(1, 6), (1, 7), (1, 8), (2, 6), (2, 7)]
    assert [one for one in held if not told.drops(*one)] == [(1, 6), (1, 7)]
    untold = read_launch(LAUNCH)
    assert [one for one in held if not untold.drops(*one)] == [(1, 6), (1, 7), (2, 6), (2, 7)], "of an older version"
