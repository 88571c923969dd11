"""Runs one seed: nothing unsafe may happen during the faults, and the job must recover after them."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from holdfast.core.log_analysis.failure_catalog import FailureCatalog
from holdfast.model.decider_events import Order
from holdfast.model.job_phase import Phase
from holdfast.sim.dst.dst_world import DstWorld, RealParts
from holdfast.sim.dst.seed_parameters import NOTICE_S, SeedSetup
from holdfast.sim.dst.virtual_loop import StuckError

_LOOK_S = 3.0
# A dud takes ready_s to be given back, and a wait for nodes may take wait_s; all the rest together is less.
HEAL_S = 500.0
END_S = 120.0


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    failure: str  # the first promise that was broken, "" if none was
    entries: int
    steps: int
    lives: int  # of the controller
    generations: int
    struck: dict[str, int]
    ended: str  # why the job ended, if it did before it was told to
    virtual_s: float


def play_seed(
    setup: SeedSetup, real: RealParts, catalog: FailureCatalog, say: Callable[[str], None] | None = None
) -> SeedResult:
    log = logging.getLogger("holdfast")
    level = log.level
    log.setLevel(logging.CRITICAL)
    world = DstWorld(setup, real, catalog, say)
    asyncio.set_event_loop(world.scene.loop)
    ended = ""
    try:
        world.start_world()
        world.scene.run(world.scene.now() + setup.faults_s)
        world.faults.stop_faults()
        world.scene.log_line("no more faults")
        _await_healing(world)
        ended = _ending_reason(world)
        _end_job(world)
        _check_record(world)
    except StuckError as e:
        world.scene.report_failure(str(e))
    finally:
        world.close()
        log.setLevel(level)
    return SeedResult(
        seed=setup.seed,
        failure=world.scene.failure,
        entries=len(world.office.disk.entries),
        steps=world.truth.steps,
        lives=world.office.lives,
        generations=max(world.teams.all, default=0),
        struck=dict(sorted(world.chances.struck.items())),
        ended=ended,
        virtual_s=world.scene.now(),
    )


def _run_until(world: DstWorld, within_s: float, reached: Callable[[DstWorld], str]) -> None:
    """Let virtual time pass until `reached` returns "". If this does not happen within `within_s` seconds, report as a
    failure what `reached` returned last."""
    until = world.scene.now() + within_s
    while not world.scene.failure and (wrong := reached(world)):
        if world.scene.now() >= until:
            world.scene.report_failure(f"{wrong}, {within_s:g} s after the last fault")
            return
        world.scene.run(min(until, world.scene.now() + _LOOK_S))


def _await_healing(world: DstWorld) -> None:
    step = world.truth.steps
    _run_until(world, HEAL_S, lambda world: _unhealed_reason(world, step))


def _unhealed_reason(world: DstWorld, step: int) -> str:
    """Return why the job is not healthy; empty if it is healthy or has ended."""
    office = world.office
    if office.ended:
        return ""
    brain = office.brain
    if brain is None:
        return "there is no controller"
    view = brain.view
    if view.phase in (Phase.ENDING, Phase.DONE):
        return "the job does not end"
    if view.phase is not Phase.TRAINING:
        return f"the job is {view.phase}"
    if world.truth.steps <= step:
        return "no step is made"
    if view.job.can_acquire and len(view.pool) < view.job.standbys:
        return f"{len(view.pool)} of {view.job.standbys} standbys are there"
    if idle := world.truth.idle_nodes(view):
        return f"{', '.join(idle)} is there, and the job makes no use of it"
    return _stray_ranks(world, view.generation)


def _stray_ranks(world: DstWorld, generation: int) -> str:
    strays = [h for machine in world.machines.values() for h in machine.running_ranks() if h.generation != generation]
    return f"ranks of generation {strays[0].generation} still live on {strays[0].machine.name}" if strays else ""


def _ending_reason(world: DstWorld) -> str:
    brain = world.office.brain
    finish = world.truth.finish
    return finish if world.office.ended or (brain and brain.view.phase in (Phase.ENDING, Phase.DONE)) else ""


def _end_job(world: DstWorld) -> None:
    """Order the job to stop, and check that it ends and that no rank lives on."""
    if not world.office.ended and not world.scene.failure:
        world.office.give_order(Order(verb="stop", who="the simulation"))
    limits = world.scene.setup.settings
    _run_until(world, END_S, lambda world: "" if world.office.ended else "the job has not ended")
    world.scene.over = True
    _run_until(world, limits.node.lost_s + NOTICE_S + END_S, lambda world: _stray_ranks(world, 0))


def _check_record(world: DstWorld) -> None:
    if not world.scene.failure:
        world.truth.check_rebuild()
        world.truth.check_spans()
