"""Keepers cut a state anew that other ranks saved: from own memory, copies and parities on peers, over real links."""

from collections.abc import Callable

import msgspec
import pytest
import torch

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.image_layout import EXTRA, ImageLayout
from holdfast.checkpoint.snapshot_metadata_record import ImageMetadata, pack_metadata, unpack_metadata
from holdfast.checkpoint.state_image import StateImage
from holdfast.core.snapshots.recut_choice import choose_recut
from holdfast.model.copy_aim import Aim
from holdfast.model.job_and_seats import Seat
from holdfast.model.restore_sources import LaunchOrigin, Restore
from holdfast.wire.rank_keeper_messages import KeeperRefusal, StateGrant, StateRequest
from tests.agent.peers import Fleet, Node, backups, until
from tests.checkpoint.test_image_recut import Place, State, columns_and_rows, fill, lay_out, make_state, rows_of

LINE = (LaunchOrigin(generation=1, stepped=True),)


def state_at(step: int) -> State:
    return make_state() | {"weight": make_state()["weight"] + step, "step": torch.tensor(float(step))}


def extra_index(layout: ImageLayout) -> int:
    return next(number for number, item in enumerate(layout.items) if item.spec.key == EXTRA)


class Divided:
    """Ranks on nodes of one rank each, among which a state is divided."""

    def __init__(self, fleet: Fleet, names: str, place: Callable[[int], Place] = rows_of) -> None:
        self.fleet, self.names = fleet, names
        self.layouts = [lay_out(make_state(), place(len(names)), rank, len(names)) for rank in range(len(names))]
        self.arenas: list[Arena] = []

    async def start(self, generation: int = 1, restore: Restore | None = None) -> None:
        for name in self.names:
            if name not in self.fleet.nodes:
                await self.fleet.add(name)
        self.fleet.launch(generation, *self.names, restore=restore)
        pairs = zip(self.names, self.layouts, strict=True)
        self.arenas = [await self.fleet.nodes[name].arena(layout, generation, 4) for name, layout in pairs]
        for arena, layout in zip(self.arenas, self.layouts, strict=True):
            whole = {one.slot for one in arena.list_sealed()}
            for slot in set(range(arena.slots)) - whole:  # as a rank does at its start
                StateImage(layout, arena.slot_image(slot)).write_frames()

    def save(self, step: int, generation: int = 1) -> None:
        for rank, (arena, layout) in enumerate(zip(self.arenas, self.layouts, strict=True)):
            slot = arena.begin_slot(step, generation)
            assert slot is not None
            told = ImageMetadata(step=step, made=step, absent=[f"absent.{rank}"], extra=f"rank {rank}".encode())
            image = fill(state_at(step), layout)
            image.put_bytes(extra_index(layout), pack_metadata(told))
            slot.image[:] = image.memory
            slot.seal()

    async def back_up(self, step: int, generation: int = 1) -> None:
        await self.fleet.aim(-1, step)
        self.save(step, generation)
        keepers = [self.fleet.nodes[name].keeper for name in self.names]
        await until(lambda: all(keeper.backing.backed == step for keeper in keepers))
        if self.fleet.parity:
            await until(lambda: all(keeper.parity_step == step for keeper in keepers))
        await self.fleet.aim(step, -1)

    def plan_for(self, names: str, alive: str) -> Restore:
        """As the controller plans for other nodes, when only these still answer."""
        seats = tuple(Seat(node=name, group_rank=i, first_rank=i, nproc=1) for i, name in enumerate(names))
        plan = choose_recut(seats, self.fleet.copies(*alive), None, LINE, Restore())
        return msgspec.structs.replace(plan, keepers={name: self.fleet.nodes[name].keeper.address for name in alive})

    async def ask(self, rank: int, generation: int = 2) -> StateGrant:
        answer = await self.fleet.nodes[self.names[rank]].ask(StateRequest(rank=rank, generation=generation))
        assert isinstance(answer, StateGrant), (answer, {name: node.said for name, node in self.fleet.nodes.items()})
        return answer

    def check(self, rank: int, state: StateGrant) -> None:
        """The rank gets what a calm one of this number would have."""
        layout, arena = self.layouts[rank], Arena.open(state.arena)
        wanted, memory = fill(state_at(state.step), layout).memory, arena.slot_image(state.slot)
        assert {(one.slot, one.step) for one in arena.list_sealed()} >= {(state.slot, state.step)}
        for item in layout.items:
            if item.spec.key != EXTRA:
                assert memory[item.offset : item.end] == wanted[item.offset : item.end], item.spec.key

    def extra(self, rank: int, state: StateGrant) -> ImageMetadata:
        layout = self.layouts[rank]
        image = StateImage(layout, Arena.open(state.arena).slot_image(state.slot))
        return unpack_metadata(image.payload_bytes(extra_index(layout)))


@pytest.mark.parametrize("parity", [False, True], ids=["copies", "parity"])
@pytest.mark.parametrize("after", ["ab", "abxy"])
async def test_the_state_of_a_lost_node_is_cut_anew_for_fewer_and_for_more(
    fleet: Fleet, after: str, parity: bool
) -> None:
    fleet.parity = parity
    job = Divided(fleet, "abc")
    await job.start()
    await job.back_up(5)
    job.save(6)
    others = Divided(fleet, after)
    plan = others.plan_for(after, "ab") if not set(after) - set("ab") else job.plan_for(after, "ab")
    assert (plan.step, plan.cut_from) == (5, 3), "nobody has step 6 of the lost rank"
    await others.start(2, plan)
    states = [await others.ask(rank) for rank in range(len(after))]
    for rank, state in enumerate(states):
        assert (state.step, state.cut_from, state.uncut) == (5, 3, "")
        others.check(rank, state)
        told = others.extra(rank, state)
        assert (told.step, told.made, told.extra, told.generators) == (5, 5, b"rank 0", None)
        assert "absent.0" in told.absent
    assert {name for rank, state in enumerate(states) for name in others.extra(rank, state).absent} == {
        f"absent.{rank}" for rank in range(3)
    }
    said = [sentence for name in after for sentence in fleet.nodes[name].said]
    assert sum("cut anew" in sentence for sentence in said) == len(after)


async def test_a_mesh_is_cut_for_ranks_in_a_row_and_the_next_agent_knows_it(fleet: Fleet) -> None:
    job = Divided(fleet, "abcd", lambda world: columns_and_rows(world // 2, 2))
    await job.start()
    await job.back_up(5)
    others = Divided(fleet, "abc")
    await others.start(2, job.plan_for("abc", "abc"))
    others.check(1, await others.ask(1))
    await fleet.restart("a")
    addresses = {name: fleet.nodes[name].keeper.address for name in "abc"}
    fleet.nodes["b"].keeper._launch = msgspec.structs.replace(
        launch := fleet.nodes["b"].keeper._launch, restore=msgspec.structs.replace(launch.restore, keepers=addresses)
    )
    state = await others.ask(1)
    assert state.source == "peer"
    others.check(1, state)
    others.check(0, await others.ask(0))


async def test_a_damaged_snapshot_is_not_cut_if_a_peer_has_a_sound_copy(fleet: Fleet) -> None:
    job = Divided(fleet, "abc")
    await job.start()
    await job.back_up(5)
    arena = job.arenas[0]
    [sealed] = arena.list_sealed()
    arena.write_checksums(sealed.slot)
    others = Divided(fleet, "ab")
    plan = job.plan_for("ab", "abc")
    memory = arena.slot_image(sealed.slot)
    memory[job.layouts[0].items[1].payload] ^= 1
    await others.start(2, plan)
    state = await others.ask(0)
    assert state.source == "peer" and fleet.nodes["a"].said[-2].startswith(
        "dropped the damaged copy of rank 0 at step 5"
    )
    others.check(0, state)


async def test_what_cannot_be_cut_for_a_rank_is_told(fleet: Fleet) -> None:
    job = Divided(fleet, "abc")
    await job.start()
    await job.back_up(5)
    others = Divided(fleet, "ab")
    others.layouts[0] = lay_out(make_state() | {"weight": torch.randn(13, 10).half()}, rows_of(2), 0, 2)
    await others.start(2, msgspec.structs.replace(job.plan_for("ab", "abc"), stored=3))
    state = await others.ask(0)
    why = "weight is float16[13, 10], and was float32[13, 10]"
    assert (state.source, state.arena, state.uncut, state.stored, state.cut_from) == ("none", "", why, 3, 3)
    assert not others.arenas[0].list_sealed()
    others.check(1, await others.ask(1))
    fleet.launch(3, *"ab", restore=fleet.nodes["a"].keeper._launch.restore)
    fleet.nodes["a"].keeper._arenas.set_aside(9)
    state = await others.ask(0, generation=3)
    assert state.uncut == "it is not known yet what rank 0 will have"


async def test_a_keeper_that_cannot_be_reached_is_no_reason_for_storage(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.agent.snapshots.keeper._REACH_S", 0.0)
    job = Divided(fleet, "abc")
    await job.start()
    await job.back_up(5)
    others = Divided(fleet, "ab")
    plan = job.plan_for("ab", "abc")
    nowhere = dict.fromkeys("abc", ("127.0.0.1", 1))
    await others.start(2, msgspec.structs.replace(plan, keepers=nowhere))
    refused = await fleet.nodes["a"].ask(StateRequest(rank=0, generation=2))
    assert isinstance(refused, KeeperRefusal) and refused.unfetched and "reached" in refused.why


def of_world(node: Node, world: int) -> set[int]:
    """The steps that a node's own arenas hold of a number of ranks."""
    arenas = [own.arena for own in (*node.keeper._arenas.list_arenas(), *node.keeper._arenas.list_aside())]
    return {one.step for arena in arenas if arena.world == world for one in arena.list_sealed()}


async def test_old_snapshots_stay_until_the_new_ones_have_copies_and_serve_a_failure_before_that(fleet: Fleet) -> None:
    job = Divided(fleet, "abc")
    await job.start()
    await job.back_up(5)
    others = Divided(fleet, "ab")
    await others.start(2, job.plan_for("ab", "ab"))
    for rank in range(2):
        others.check(rank, await others.ask(rank))
    others.save(6, generation=2)
    a = fleet.nodes["a"]
    await until(lambda: of_world(a, 2) == {5, 6})
    assert of_world(a, 3) == {5}, "until step 6 has copies, the loss of a node leads back to step 5"
    await others.back_up(7, generation=2)
    await until(lambda: of_world(a, 3) == set())
    assert len([name for name in a.memory if name.startswith("rank-")]) == 1, "the memory is given back"


async def test_copies_of_the_old_ranks_stay_until_all_nodes_have_copied_a_new_state(fleet: Fleet) -> None:
    job = Divided(fleet, "abc")
    await job.start()
    await job.back_up(5)
    others = Divided(fleet, "ab")
    await others.start(2, job.plan_for("ab", "ab"))
    for rank in range(2):
        others.check(rank, await others.ask(rank))
    await fleet.nodes["b"].keeper.apply_aim(Aim(generation=2))  # it sends nothing, so the next floor is never whole
    a = fleet.nodes["a"]
    at = fleet.nodes["b"].keeper.address
    await a.keeper.apply_aim(Aim(generation=2, next=6, peer="b", peer_at=at))
    others.save(6, generation=2)
    await until(lambda: a.keeper.backing.backed == 6)
    assert backups(fleet.nodes["b"]) >= {(0, 5), (0, 6)}
    await fleet.restart("b")
    assert backups(fleet.nodes["b"]) >= {(0, 5), (0, 6)}, "the next agent knows both"
    last = Divided(fleet, "b")
    plan = job.plan_for("b", "bc")
    assert (plan.step, plan.cut_from) == (5, 3), "when node a is lost as well, step 6 is not whole"
    await last.start(3, plan)
    last.check(0, await last.ask(0, generation=3))
    await last.back_up(7, generation=3)
    kept = fleet.nodes["b"].memory  # node b is its own peer here
    await until(lambda: [name for name in kept if name.startswith("backup-")] == ["backup-0.2"])


async def test_ranks_of_the_old_number_get_their_arenas_again(fleet: Fleet) -> None:
    job = Divided(fleet, "abc")
    await job.start()
    await job.back_up(5)
    paths = [own.path for own in fleet.nodes["a"].keeper._arenas.list_arenas()]
    others = Divided(fleet, "ab")
    await others.start(2, job.plan_for("ab", "ab"))
    again = Divided(fleet, "abc")
    fleet.seats = tuple(Seat(node=name, group_rank=i, first_rank=i, nproc=1) for i, name in enumerate("abc"))
    await again.start(3, fleet.plan("a", "b", "c"))
    arenas = fleet.nodes["a"].keeper._arenas
    own = arenas.find_arena(0)
    assert own is not None and own.path in paths and of_world(fleet.nodes["a"], 3) == {5}
