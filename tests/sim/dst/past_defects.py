"""Defects that the control plane once had: each mend is undone, one at a time, in the real code."""

from typing import Any

import msgspec
import pytest

from holdfast.agent.agent_shell import Agent
from holdfast.controller.actions.errand_dispatch import ErrandDispatch
from holdfast.controller.agent_ingest import AgentIngest
from holdfast.controller.node_links import NodeLinks
from holdfast.core.decide import controller_takeover
from holdfast.core.decide.launch_fence import Fence
from holdfast.core.membership.job_nodes import JobNodes
from holdfast.core.membership.standbys import Standbys
from holdfast.core.snapshots import lineage, restore_choice
from holdfast.core.snapshots.keeper_launch_state import KeeperLaunch
from holdfast.core.snapshots.lineage import Line
from holdfast.model.restore_sources import Restore
from holdfast.sim.dst.seed_parameters import SeedSetup
from tests.sim.dst.mutant import Mutant, Patch, draw_forgetful, draw_stalled, draw_with_disks, lines_are_unknown


def stopped_launch_told_again(patch: Patch) -> None:
    """A node that lost its power amid a stop is told to launch what is being stopped, and has forgotten the stop."""
    relink = ErrandDispatch.on_relink

    def on_relink(self: ErrandDispatch, node: str) -> None:
        stopping, self._stopping = self._stopping, 0
        relink(self, node)
        self._stopping = stopping

    patch.setattr(ErrandDispatch, "on_relink", on_relink)


def late_hello_replaces_link(patch: Patch) -> None:
    """A hello that comes late by an older link replaces the newer one, and no errand reaches the node any more."""
    patch.setattr(NodeLinks, "has_newer_link", lambda self, node, outbox: False)


def ends_dated_at_once(patch: Patch) -> None:
    """An agent dates the end of a rank although no controller has told it the time yet."""
    exited = Agent._on_rank_exit

    def on_rank_exit(self: Agent, held: Any) -> None:
        known, self.controller_clock.known = self.controller_clock.known, True
        exited(self, held)
        self.controller_clock.known = known

    patch.setattr(Agent, "_on_rank_exit", on_rank_exit)


def unseen_steps_leave_no_line(patch: Patch) -> None:
    """Steps of which no controller has heard are taken for those that older generations have left on disks."""
    choose = restore_choice._choose_of_lines

    def chooses(seats: Any, copies: Any, not_after: Any, line: Line) -> Restore:
        told = max((one.generation for one in line if one.stepped), default=0)
        heads = {step: lineage.find_maker(line, told, step) for step in {copy.step for copy in copies}}
        named = [c if c.disk else msgspec.structs.replace(c, generation=heads[c.step]) for c in copies]
        return choose(seats, named, not_after, line)

    patch.setattr(restore_choice, "_choose_of_lines", chooses)
    keepers_know_steps_alone(patch)


def keepers_know_steps_alone(patch: Patch) -> None:
    """A launch does not drop what a node holds of another line up to the step that it resumes from."""
    patch.setattr(KeeperLaunch, "drops", lambda self, generation, step: step > self.shared_step)


# --- a journal that has lost its end -----------------------------------------------------------------------------


def standbys_stay_believed(patch: Patch) -> None:
    """Standbys that the journal still has as such may run ranks of the generation that it has lost."""
    patch.setattr(Standbys, "doubt_all", lambda self, now: None)


def unknown_generation_not_fenced(patch: Patch) -> None:
    """What the journal has lost is launched over, although its nodes may train on."""
    taken_over = controller_takeover._on_lost_journal

    def takes_over(state: Any, now: float, lost: Any) -> str:
        with pytest.MonkeyPatch.context() as unfenced:
            unfenced.setattr(Fence, "raise_fence", lambda self, now, nodes: [])
            return taken_over(state, now, lost)

    patch.setattr(controller_takeover, "_on_lost_journal", takes_over)


def lineage_kept(patch: Patch) -> None:
    """States of a line that was left by a generation that the journal has lost are mixed into the next launch."""
    lines_are_unknown(patch)
    patch.setattr(JobNodes, "set_lineage", lambda self, nodes: None)


def last_call_stays_over(patch: Patch) -> None:
    """A last call that is over is asked for again and again, while nothing can be launched."""
    taken_over = controller_takeover._on_lost_journal

    def takes_over(state: Any, now: float, lost: Any) -> str:
        before = state.wait_until, state.last_call_at
        told = taken_over(state, now, lost)
        state.wait_until, state.last_call_at = before
        return told

    patch.setattr(controller_takeover, "_on_lost_journal", takes_over)


def lost_seats_are_nobodys(patch: Patch) -> None:
    """What a node tells of a generation that the journal has lost is acknowledged and ignored."""
    patch.setattr(AgentIngest, "_had_lost_seat", lambda self, node, generation: False)


def _draw_rough_with_disks(seed: int) -> SeedSetup:
    return msgspec.structs.replace(draw_with_disks(seed), pause_s=1.5, faults_s=120.0, stop_s=0.0, last_step=0)


def _draw_forgetful_with_disks(seed: int) -> SeedSetup:
    return msgspec.structs.replace(draw_with_disks(seed), forgets=True)


PAST_DEFECTS = (
    Mutant(stopped_launch_told_again, 218),
    Mutant(late_hello_replaces_link, 9, draw_stalled),
    Mutant(ends_dated_at_once, 41),
    Mutant(standbys_stay_believed, 28, draw_forgetful),
    Mutant(unknown_generation_not_fenced, 727, draw_forgetful),
    Mutant(lineage_kept, 121, draw_forgetful),
    Mutant(last_call_stays_over, 156, draw_forgetful),
    Mutant(unseen_steps_leave_no_line, 194, _draw_rough_with_disks),
    Mutant(keepers_know_steps_alone, 194, _draw_rough_with_disks),
    Mutant(lost_seats_are_nobodys, 208, _draw_forgetful_with_disks),
)
