"""The real agent as a process of a simulated machine: it dies where it is told to, and then does nothing any more."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.cli.commands.sim_dst import REAL_PARTS
from holdfast.core.agent_state_machine import RememberDone
from holdfast.logs import catalog_files
from holdfast.model.node_errands import Done
from holdfast.sim.dst.agent_process import AgentProcess
from holdfast.sim.dst.dst_world import DstWorld
from holdfast.sim.dst.real_program_protocols import AgentCrashed
from holdfast.sim.dst.seed_parameters import draw_setup
from holdfast.sim.dst.simulated_agent_notes import SimNotes
from holdfast.wire.holder_messages import RankEnded

DONE = Done(id=7, node="n0", ok=True)


@pytest.fixture
def world() -> Iterator[DstWorld]:
    """A job that trains."""
    setup = draw_setup(1)
    job = msgspec.structs.replace(setup.job, min_nodes=2, max_nodes=2, standbys=0, can_acquire=False, probes=False)
    made = DstWorld(
        msgspec.structs.replace(setup, job=job, last_step=0), REAL_PARTS, catalog_files.load_failures(), None
    )
    asyncio.set_event_loop(made.scene.loop)
    made.start_world()
    made.faults.stop_faults()
    made.scene.run(made.scene.now() + 60.0)
    assert not made.scene.failure and made.truth.steps > 10
    yield made
    made.close()


def agent_of(world: DstWorld, name: str = "n0") -> AgentProcess:
    process = world.machines[name].agent
    assert isinstance(process, AgentProcess)
    return process


@pytest.mark.parametrize(("point", "written"), [("carried", False), ("remembered", True)])
def test_it_dies_just_before_or_just_after_it_writes(world: DstWorld, point: str, written: bool) -> None:
    process, disk = agent_of(world), world.machines["n0"].disk
    world.chances.armed["n0"] = point
    with pytest.raises(AgentCrashed):
        SimNotes(process).write_deed(RememberDone(DONE))
    assert (DONE in disk.done) == written
    assert world.machines["n0"].agent is None and not process.alive


def test_who_is_dead_changes_nothing(world: DstWorld) -> None:
    process, machine = agent_of(world), world.machines["n0"]
    stopped, running = machine.disk.stopped, machine.running_ranks()
    machine.kill_agent()
    with pytest.raises(AgentCrashed):
        SimNotes(process).write_stopped(99)
    with pytest.raises(AgentCrashed):
        process.holder.quit_holder(1)
    assert (machine.disk.stopped, machine.running_ranks()) == (stopped, running) and machine.alive


def test_the_next_one_goes_on_and_its_ranks_did_not_notice(world: DstWorld) -> None:
    first, steps = agent_of(world), world.truth.steps
    world.machines["n0"].kill_agent()
    world.scene.run(world.scene.now() + 60.0)
    second = agent_of(world)
    assert second is not first and second.link is not None, "it has a link of its own"
    assert second.agent.life.generation == first.agent.life.generation > 0
    assert world.truth.steps > steps + 10 and not world.scene.failure


def test_an_end_that_nobody_heard_is_told_by_the_next_one(world: DstWorld) -> None:
    """Whoever was to hear of it died first."""
    machine = world.machines["n0"]
    generation = agent_of(world).agent.life.generation
    machine.end_rank(machine.running_ranks()[0], -11)
    machine.kill_agent()
    world.scene.run(world.scene.now() + 120.0)
    assert not world.scene.failure
    assert agent_of(world).agent.life.generation > generation, "all ranks were started again"


def test_an_agent_that_fails_is_a_finding(world: DstWorld) -> None:
    agent_of(world).holder.send_agent(RankEnded(rank=None))  # type: ignore[arg-type]
    world.scene.run(world.scene.now() + 10.0)
    assert " n0 " in world.scene.failure and ": AttributeError" in world.scene.failure
