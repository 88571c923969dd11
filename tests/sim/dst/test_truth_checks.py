"""The checks themselves: they name a state of a line that the job has left, and no other."""

import re
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.arena_header import arena_bytes
from holdfast.cli.commands.sim_dst import REAL_PARTS
from holdfast.logs import catalog_files
from holdfast.model.decider_events import Progress
from holdfast.model.job_phase import Phase
from holdfast.model.journal_entry import Decision, Entry
from holdfast.sim.dst.dst_world import DstWorld
from holdfast.sim.dst.seed_parameters import draw_setup
from holdfast.sim.dst.simulated_machine import SimRank
from holdfast.sim.dst.simulated_ranks import RankTeam
from holdfast.sim.dst.simulated_state_image import StateTruth, make_layout, write_truth


class History:
    """A job of one rank on one machine, whose generations are told by hand."""

    def __init__(self) -> None:
        self.world = DstWorld(draw_setup(1), REAL_PARTS, catalog_files.load_failures(), None)
        self.machine = self.world.machines[self.world.cloud.make_machine()]

    def resume(self, generation: int, snap: StateTruth | None) -> str:
        """Let a generation go on from a state in memory, or begin anew; return the promise that this breaks."""
        self.team = RankTeam(self.world.teams, generation, 1)
        held = SimRank(generation=generation, rank=0, machine=self.machine, world=1, release=1)
        self.world.truth.on_restore(generation, [held], {0: snap}, memory=snap is not None)
        return self.world.scene.failure

    def hold(self, truth: StateTruth) -> None:
        """Put a state into the memory of the machine."""
        plan, memory = make_layout(0, 1), self.machine.memory
        path = memory.make_arena(f"of {truth.made}", arena_bytes(plan.image_bytes, 1))
        arena = Arena.make(path, layout=plan.digest, image_bytes=plan.image_bytes, slots=1)
        slot = arena.begin_slot(truth.step, truth.made)
        assert slot
        write_truth(slot.image, truth)
        slot.seal()

    def make_steps(self, last: int) -> None:
        for step in range(self.team.step + 1, last + 1):
            self.team.step = step
            self.world.truth.on_step(self.team.generation, step, [])

    def journal_step(self, generation: int) -> None:
        at = self.world.scene.now()
        event = Progress(generation=generation, step=3, at=at, first_step=1, first_at=at, counted=False)
        decision = Decision(actions=(), wake_at=None, reason="", phase=Phase.TRAINING)
        self.world.truth._remember_entry(Entry(seq=1, at=at, event=event, decision=decision))


@pytest.fixture
def history() -> Iterator[History]:
    """Generation 1 has made three steps, and the journal knows it. Generation 2 began anew and made three as well."""
    told = History()
    told.resume(1, None)
    told.make_steps(3)
    told.journal_step(1)
    told.resume(2, None)
    told.make_steps(3)
    yield told
    told.world.close()


def third_step(made: int) -> StateTruth:
    return StateTruth(step=3, made=made)


def test_the_newest_line_is_not_left_although_the_journal_never_heard_of_it(history: History) -> None:
    assert history.resume(3, third_step(2)) == ""


def test_a_line_is_left_once_the_journal_knows_a_newer_one(history: History) -> None:
    history.journal_step(2)
    broken = history.resume(3, third_step(1))
    assert re.search(r"\bgeneration 3 .* step 3 of 1, .* of 2 .* from 2$", broken), broken


def test_a_node_must_not_keep_a_state_of_a_line_that_was_left(history: History) -> None:
    history.hold(third_step(2))
    assert history.resume(3, third_step(2)) == ""
    history.hold(third_step(1))
    broken = history.resume(4, third_step(2))
    assert re.search(r"\bn0 .* step 3 of rank 0 from 1, .* of 4 .* from 2$", broken), broken
