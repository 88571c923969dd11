"""Two copies of every state: a node and the keeper of its copies are lost at once, and the job does not go back."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from holdfast.cli.commands.sim_dst import REAL_PARTS
from holdfast.core.snapshots.copy_keepers import choose_keepers
from holdfast.core.snapshots.floor_pins_and_copies import NodeFloor
from holdfast.core.snapshots.recovery_floor_coordination import RecoveryFloor
from holdfast.logs import catalog_files
from holdfast.sim.dst.dst_world import DstWorld
from holdfast.sim.dst.seed_parameters import SeedSetup, draw_setup
from holdfast.sim.dst.seed_run import play_seed
from tests.sim.dst.mutant import Patch, draw_rough


def keep_two(setup: SeedSetup, copies: int = 2) -> SeedSetup:
    """The same job, with at least three nodes."""
    nodes = max(3, setup.job.max_nodes)
    job = msgspec.structs.replace(setup.job, copies=copies, max_nodes=nodes, min_nodes=min(nodes, setup.job.min_nodes))
    backup = msgspec.structs.replace(setup.settings.backup, copies=copies, enabled=True)
    return msgspec.structs.replace(setup, job=job, settings=msgspec.structs.replace(setup.settings, backup=backup))


def resumed_after_two_losses(seed: int, copies: int = 2) -> tuple[int, int]:
    """Lose a node and its first keeper at once, without storage. Return the step before, and the one resumed from."""
    setup = keep_two(draw_setup(seed), copies)
    job = msgspec.structs.replace(
        setup.job, min_nodes=4, max_nodes=4, standbys=2, can_acquire=False, probes=False, checks=False
    )
    setup = msgspec.structs.replace(setup, job=job, save_steps=0, last_step=0)
    world = DstWorld(setup, REAL_PARTS, catalog_files.load_failures(), None)
    asyncio.set_event_loop(world.scene.loop)
    try:
        world.start_world()
        world.faults.stop_faults()
        world.scene.run(world.scene.now() + 60.0)
        before = world.truth.steps
        owner = sorted(machine.name for machine in world.machines.values() if machine.running_ranks())[seed % 4]
        assert world.office.brain
        view = world.office.brain.view
        for name in (owner, choose_keepers(view.seats, view.mesh, copies)[0][owner][0]):
            world.machines[name].end_machine("it is lost")
        world.scene.run(world.scene.now() + 120.0)
        assert not world.scene.failure and world.truth.steps > before > 10
        return before, world.truth._from[max(world.truth._from)][0]
    finally:
        world.close()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_a_node_and_its_first_keeper_are_lost_at_once(seed: int) -> None:
    before, resumed = resumed_after_two_losses(seed)
    assert resumed > before / 2, "it goes on, and does not begin anew"


@pytest.mark.slow
def test_one_copy_is_lost_with_them() -> None:
    """What the second copy is for: else the job begins anew."""
    assert resumed_after_two_losses(1, copies=1)[1] == 0


def second_is_not_sent(patch: Patch) -> None:
    """A node believes that its copies are complete when the first keeper has them."""
    makes = NodeFloor._make_parcels
    patch.setattr(NodeFloor, "_make_parcels", lambda self, one: makes(self, one)[:1])


def second_is_refused(patch: Patch) -> None:
    """A keeper is not told of those whose second copies it keeps, and takes none from them."""
    wards = RecoveryFloor._wards_of
    patch.setattr(
        RecoveryFloor,
        "_wards_of",
        lambda self, keeper: tuple(seat for seat in wards(self, keeper) if self.peers[seat.node] == keeper),
    )


@pytest.mark.slow
@pytest.mark.parametrize("plant", [second_is_not_sent, second_is_refused])
def test_planted_bugs_are_seen(plant: Callable[[Patch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert resumed_after_two_losses(1)[1] == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_whatever_fails_nothing_unsafe_happens(seed: int) -> None:
    result = play_seed(keep_two(draw_rough(seed)), REAL_PARTS, catalog_files.load_failures())
    assert not result.failure, result.failure
