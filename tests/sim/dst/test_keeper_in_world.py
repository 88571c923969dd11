"""The real keeper on simulated machines: real bytes are copied and fetched, and pins end with their agent."""

import asyncio
import gc
import os
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.agent.agent_shell import Agent
from holdfast.agent.snapshots.keeper import Keeper
from holdfast.checkpoint.arena import Arena
from holdfast.cli.commands.sim_dst import REAL_PARTS
from holdfast.core.snapshots.recovery_floor_coordination import BackupLimits
from holdfast.logs import catalog_files
from holdfast.sim.dst.agent_process import AgentProcess
from holdfast.sim.dst.dst_world import DstWorld
from holdfast.sim.dst.seed_parameters import draw_setup
from holdfast.sim.dst.simulated_machine import SimMachine
from holdfast.sim.dst.virtual_loop import VirtualLoop


def trained_world() -> DstWorld:
    """A job that trains on two nodes, with a standby. It copies snapshots, and has no storage."""
    setup = draw_setup(1)
    job = msgspec.structs.replace(
        setup.job, min_nodes=2, max_nodes=2, standbys=1, can_acquire=False, probes=False, checks=False
    )
    settings = msgspec.structs.replace(setup.settings, backup=BackupLimits(duty=0.5))
    setup = msgspec.structs.replace(setup, job=job, settings=settings, nproc=1, save_steps=0, last_step=0)
    made = DstWorld(setup, REAL_PARTS, catalog_files.load_failures(), None)
    asyncio.set_event_loop(made.scene.loop)
    made.start_world()
    made.faults.stop_faults()
    made.scene.run(made.scene.now() + 60.0)
    assert not made.scene.failure and made.truth.steps > 10
    return made


@pytest.fixture
def world() -> Iterator[DstWorld]:
    made = trained_world()
    yield made
    made.close()


def keeper_of(machine: SimMachine) -> Keeper:
    assert isinstance(machine.agent, AgentProcess) and isinstance(machine.agent.agent, Agent)
    keeper = machine.agent.agent.keeper
    assert isinstance(keeper, Keeper)
    return keeper


def seated(world: DstWorld) -> list[SimMachine]:
    return [machine for machine in world.machines.values() if machine.running_ranks()]


def test_copies_on_peers_have_the_bytes_of_the_snapshots(world: DstWorld) -> None:
    machines = seated(world)
    assert len(machines) == 2
    for machine in machines:
        own = machine.running_ranks()[0].rank
        held = [(rank, sealed, truth) for rank, sealed, truth in machine.memory.list_states() if rank != own]
        assert held, "the copy of its peer"
        assert all((truth.step, truth.made) == (sealed.step, 1) for _, sealed, truth in held)


def test_a_lost_node_s_state_is_fetched_from_its_peer(world: DstWorld) -> None:
    lost, before = seated(world)[0], world.truth.steps
    lost.end_machine("it is lost")
    world.scene.run(world.scene.now() + 90.0)
    assert not world.scene.failure and world.truth.steps > before + 10
    step, made = world.truth._from[max(world.truth._from)]
    assert made == 1 and step > before / 2, "the next generation goes on, and does not begin anew"


def test_the_next_agent_knows_launch_arenas_and_copies_and_old_pins_are_void(world: DstWorld) -> None:
    machine = seated(world)[0]
    first = keeper_of(machine)
    pinned = [own.arena.count_pinned() for own in first._arenas.list_arenas()]
    assert any(pinned), "the floor"
    machine.kill_agent()
    arena = Arena.open(machine.memory.kept[f"rank-{machine.running_ranks()[0].rank}"].path)
    assert arena.list_sealed() and arena.count_pinned() == 0
    world.scene.run(world.scene.now() + 20.0)
    second = keeper_of(machine)
    assert second is not first and second._launch == first._launch
    assert {copy.rank for copy in second.list_copies()} == {0, 1}
    assert not world.scene.failure


def count_arenas() -> int:
    """Return how many arenas of simulated holders this process still has."""
    return sum("/memfd:simulated-" in os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if fd.is_symlink())


def test_a_world_leaves_no_arenas_behind() -> None:
    gc.collect()
    before = count_arenas()
    made = trained_world()
    assert count_arenas() > before
    made.close()
    del made
    gc.collect()
    assert count_arenas() <= before


def test_a_thread_takes_virtual_time_and_ends_with_who_waits_for_it() -> None:
    loop = VirtualLoop(1)
    ran: list[str] = []

    def run(name: str) -> str:
        ran.append(name)
        return "told"

    async def work() -> float:
        began_at = loop.time()
        assert await asyncio.to_thread(run, "one") == "told"
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        waiting = asyncio.create_task(asyncio.to_thread(run, "two"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(10.0)
        return loop.time() - began_at

    try:
        assert loop.run_until_complete(work()) > 10.0 and ran == ["one"]
    finally:
        loop.close()
