"""A keeper in a world of another size: arenas that were set aside, and states that any rank may take."""

import msgspec
import pytest

from holdfast.checkpoint.arena import Arena
from holdfast.model.job_and_seats import Seat
from holdfast.model.node_errands import LaunchHere
from holdfast.model.restore_sources import Restore
from holdfast.wire.rank_keeper_messages import StateGrant, StateRequest
from tests.agent.test_keeper import Bench, bench, launch, snapshot, until, want  # noqa: F401  a fixture


def resized(generation: int, world: int, rank: int, step: int) -> LaunchHere:
    seat = Seat(node="n0", group_rank=rank, first_rank=rank, nproc=1)
    told = launch(generation, Restore(step=step, maker=1, replicated=True))
    return msgspec.structs.replace(told, seat=seat, world_size=world)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_whole_state_is_restored_in_a_world_of_another_size(bench: Bench, rank: int) -> None:  # noqa: F811
    bench.keeper.begin_launch(launch(1))
    snapshot(await bench.arena(want(1)), 6)
    content = snapshot(Arena.open(bench.kept()[0].path), 7)
    bench.keeper.begin_launch(resized(2, 2, rank, 7))
    asked = msgspec.structs.replace(want(2), rank=rank, world=2, layout="cd" * 32)
    again = await bench.arena(asked)
    for keeper in (bench.keeper, bench.fresh()):
        if keeper is not bench.keeper:  # the next agent's
            keeper.adopt_arenas(bench.kept())
        state = await keeper._find_state(StateRequest(rank=rank, generation=2))
        assert isinstance(state, StateGrant) and (state.source, state.step, state.replicated) == ("memory", 7, True)
        old = Arena.open(state.arena)
        assert bytes(old.slot_image(state.slot)) == content and (old.rank, old.world) == (0, 1)
        assert {(copy.rank, copy.world, copy.step) for copy in keeper.list_copies()} == {(0, 1, 6), (0, 1, 7)}
    snapshot(again, 7, 2)
    await until(lambda: {copy.world for copy in bench.keeper.list_copies()} == {2})
    assert sorted(bench.memory.values(), key=lambda one: one[1])[0][1] == 0, "the memory is given back"


async def test_a_node_without_the_whole_state_gets_it_from_another_rank(bench: Bench) -> None:  # noqa: F811
    bench.keeper.begin_launch(resized(2, 2, 1, 7))
    await bench.arena(msgspec.structs.replace(want(2), rank=1, world=2))
    state = await bench.ask(StateRequest(rank=1, generation=2))
    assert state == StateGrant(source="replica", step=7, replicated=True)
