"""What a keeper takes from a launch: whom it serves, where states come from, and what is dropped."""

import msgspec

from holdfast.core.snapshots.launch_lineage import read_launch
from holdfast.model.errand import LaunchHere
from holdfast.model.job_and_seats import Seat
from holdfast.model.state_copy import Restore, Source

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
