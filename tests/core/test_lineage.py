"""Which states are of one line, against a model that keeps every state that was ever made."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.snapshots import lineage
from holdfast.core.snapshots.lineage import Line, add_launch, bans_before, find_maker, is_of_line, list_heads
from holdfast.core.snapshots.restore_choice import choose_known_restore
from holdfast.model.job_and_seats import Seat
from holdfast.model.restore_sources import LaunchOrigin
from holdfast.model.state_copy import Copy
from holdfast.model.state_doubt import Doubt


class World:
    """Every generation holds the states that it took up and made, each with the generation that really made it."""

    def __init__(self) -> None:
        self.line: Line = ()
        self.held: dict[int, dict[int, int]] = {}  # generation -> step -> maker

    def launch(self, origin: int, step: int, makes: int, told: bool) -> None:
        """Resume from a step that an older generation holds (0: from storage or nothing), and make some steps."""
        generation = len(self.held) + 1
        before = self.held.get(origin, {})
        step = max((one for one in before if one <= step), default=-1)
        maker = before.get(step, 0)
        self.held[generation] = {one: made for one, made in before.items() if one <= step}
        first = step + 1 if step >= 0 else 5  # of the steps that storage has
        self.held[generation].update(dict.fromkeys(range(first, first + makes), generation))
        launched = LaunchOrigin(generation=generation, step=step, maker=maker, stepped=told and makes > 0)
        self.line = add_launch(self.line, launched)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = World()
    for generation in range(1, draw(st.integers(2, 9))):
        world.launch(
            origin=draw(st.integers(0, generation - 1)),
            step=draw(st.integers(0, 15)),
            makes=draw(st.integers(0, 4)),
            told=draw(st.booleans()),
        )
    return world


@given(worlds())
def test_two_generations_have_the_same_state_of_a_step_only_if_one_made_it_for_both(world: World) -> None:
    for head, heads in world.held.items():
        for step, made in heads.items():
            assert find_maker(world.line, head, step) == made
        for other, others in world.held.items():
            for step in heads.keys() & others.keys():
                same = heads[step] == others[step]
                assert is_of_line(world.line, head, other, step) is same, (head, other, step)


@given(worlds(), st.data())
def test_no_restore_mixes_lines_whatever_nodes_hold(world: World, data: st.DataObject) -> None:
    """Each node tells any states, under the name of a generation that held them."""
    names = sorted((generation, step) for generation, held in world.held.items() for step in held)
    told = st.lists(st.sampled_from(names), max_size=6, unique=True) if names else st.just([])
    copies = [
        Copy(rank=rank, step=step, node=node, layout="l", world=2, whole=True, generation=generation, disk=disk)
        for rank, node in enumerate("ab")
        for generation, step in data.draw(told)
        for disk in [data.draw(st.booleans())]
    ]
    seats = tuple(Seat(node=node, group_rank=rank, first_rank=rank, nproc=1) for rank, node in enumerate("ab"))
    plan = choose_known_restore(seats, copies, "ab", None, world.line)
    newest = max((one.generation for one in world.line if one.stepped), default=0)
    heads = [
        head for head in world.held if head == newest or (head > newest and head in {c.generation for c in copies})
    ]
    whole = {
        (step, made)
        for head in heads
        for step, made in world.held[head].items()
        if {c.rank for c in copies if c.step == step and world.held[c.generation][step] == made} == {0, 1}
    }
    if plan.sources:
        assert {world.held[kept.generation][plan.step] for kept in plan.kept} == {plan.maker}, "of one line"
        assert (plan.step, plan.maker) in whole
    assert (plan.step if plan.sources else -1) == max((step for step, _ in whole), default=-1), "and the newest"


def test_a_launch_beside_one_that_was_not_heard_of_leaves_it() -> None:
    """3 resumes from step 45, which 1 made, and not from that which 2 made: steps alone do not tell them apart."""
    line: Line = ()
    for origin in (
        LaunchOrigin(generation=1, stepped=True),
        LaunchOrigin(generation=2),
        LaunchOrigin(generation=3, step=45, maker=1),
    ):
        line = add_launch(line, origin)
    assert [is_of_line(line, 3, made, 45) for made in (1, 2, 3)] == [True, False, True]
    assert list_heads(line, {1, 2}) == [1, 2], "what 2 made may be gone on with, if it is whole"
    line = add_launch(line, LaunchOrigin(generation=4, step=44, maker=1, stepped=True))
    assert list_heads(line, {1, 2, 3}) == [4], "but not once the job has told of a step since"


def test_of_many_launches_the_oldest_are_forgotten_and_no_older_disk_is_believed() -> None:
    line: Line = ()
    left: tuple[Doubt, ...] = (Doubt(generation=0, not_after=7),)
    for generation in range(1, 200):
        step = 10 * generation - 1 if generation > 1 else -1
        line = add_launch(line, LaunchOrigin(generation=generation, step=step, maker=generation - 1, stepped=True))
        left = bans_before(line, left)
        assert left == (
            Doubt(generation=max(0, generation - lineage._LAUNCHES), not_after=7 if generation < 64 else -1),
        )
    assert len(line) == lineage._LAUNCHES and find_maker(line, 199, 1500) == 150
    assert find_maker(line, 199, 500) == 0 and not is_of_line(line, 199, 150, 1600)
    assert add_launch(line, LaunchOrigin(generation=190))[-2:] == (line[-11], LaunchOrigin(generation=190))
    assert msgspec.json.decode(msgspec.json.encode(line), type=Line) == line
