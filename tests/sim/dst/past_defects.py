"""Defects that the control plane once had: each mend is undone, one at a time, in the real code."""

from collections.abc import Set
from typing import Any

import pytest

from holdfast.controller.actions.action_executor import ActionExecutor
from holdfast.controller.agent_ingest import AgentIngest
from holdfast.core.decide import controller_takeover
from holdfast.core.decide.launch_fence import Fence
from holdfast.core.detect.rankless_nodes import MissingRanksDetector
from holdfast.core.membership.job_nodes import JobNodes
from holdfast.core.membership.standbys import Standbys
from holdfast.model.errand import LaunchHere
from holdfast.model.event import Outcome
from holdfast.sim.dst.seed_setup import draw_setup
from holdfast.sim.dst.simulated_agent import SimAgent
from holdfast.wire import agent_messages
from tests.sim.dst.mutant import Mutant, Patch, draw_forgetful


def checked_node_expected_again(patch: Patch) -> None:
    """A node that is being checked when its acquisition is heard of is expected once more, and given back as late."""
    acquired = Standbys.on_acquired

    def on_acquired(self: Standbys, now: float, event: Outcome, active: Set[str]) -> str:
        told = acquired(self, now, event, active)
        self.coming |= {node: now for node in event.nodes if node in self.under_probe}
        return told

    patch.setattr(Standbys, "on_acquired", on_acquired)


def stopped_launch_told_again(patch: Patch) -> None:
    """A node that lost its power amid a stop is told to launch what is being stopped, and has forgotten the stop."""
    relink = ActionExecutor.on_relink

    def on_relink(self: ActionExecutor, node: str) -> None:
        stopping, self._stopping = self._stopping, 0
        relink(self, node)
        self._stopping = stopping

    patch.setattr(ActionExecutor, "on_relink", on_relink)


def later_steps_stay_known(patch: Patch) -> None:
    """An evicted node that is not gone yet holds a step that the next generation makes anew, and is asked for it."""
    recall, share = ActionExecutor._recall_or_plan, ActionExecutor._node_restore
    known: dict[int, Any] = {}

    def recalls(self: ActionExecutor, launch: Any) -> Any:
        known[id(self)] = self.copies
        return recall(self, launch)

    def shares(self: ActionExecutor, seat: Any, plan: Any) -> Any:
        self.copies = known[id(self)]
        return share(self, seat, plan)

    patch.setattr(ActionExecutor, "_recall_or_plan", recalls)
    patch.setattr(ActionExecutor, "_node_restore", shares)


def refused_launch_drops_nothing(patch: Patch) -> None:
    """A node whose disk is full refuses a launch, and hands over states of the line that was left by it."""
    run = SimAgent._run_errand

    def runs(self: SimAgent, errand: Any) -> None:
        if isinstance(errand, LaunchHere) and self.machine.disk.full:
            self.later(0.01, self._on_launched, errand, "what is launched cannot be written")
        else:
            run(self, errand)

    patch.setattr(SimAgent, "_run_errand", runs)


def ends_dated_at_once(patch: Patch) -> None:
    """An agent dates the end of a rank although no controller has told it the time yet."""
    exited = SimAgent.on_rank_exit

    def on_rank_exit(self: SimAgent, held: Any) -> None:
        known, self._known = self._known, True
        exited(self, held)
        self._known = known

    patch.setattr(SimAgent, "on_rank_exit", on_rank_exit)


# --- a journal that has lost its end -----------------------------------------------------------------------------


def standbys_stay_believed(patch: Patch) -> None:
    """Standbys that the journal still has as such may run ranks of the generation that it has lost."""
    patch.setattr(Standbys, "doubt_all", lambda self, now: None)


def unknown_generation_not_fenced(patch: Patch) -> None:
    """What the journal has lost is launched over, although its nodes may train on."""
    taken_over = controller_takeover._on_lost_journal

    def takes_over(d: Any, now: float, lost: Any) -> str:
        with pytest.MonkeyPatch.context() as unfenced:
            unfenced.setattr(Fence, "raise_fence", lambda self, now, nodes: [])
            return taken_over(d, now, lost)

    patch.setattr(controller_takeover, "_on_lost_journal", takes_over)


def lineage_kept(patch: Patch) -> None:
    """States of a line that was left by a generation that the journal has lost are mixed into the next launch."""
    patch.setattr(JobNodes, "set_lineage", lambda self, nodes: None)


def awaited_node_taken_as_seated(patch: Patch) -> None:
    """An evicted node that is to report anew is taken for a seated one, and given back as late."""
    hello_heard = AgentIngest._on_hello

    def on_hello(self: AgentIngest, now: float, hello: agent_messages.Hello, outbox: Any) -> None:
        coming = self.decider.coming
        asked_at = coming.pop(hello.node) if self._is_seated(hello.node) and hello.node in coming else None
        hello_heard(self, now, hello, outbox)
        if asked_at is not None:
            coming[hello.node] = asked_at

    patch.setattr(AgentIngest, "_on_hello", on_hello)


def last_call_stays_over(patch: Patch) -> None:
    """A last call that is over is asked for again and again, while nothing can be launched."""
    taken_over = controller_takeover._on_lost_journal

    def takes_over(d: Any, now: float, lost: Any) -> str:
        before = d.wait_until, d.last_call_at
        told = taken_over(d, now, lost)
        d.wait_until, d.last_call_at = before
        return told

    patch.setattr(controller_takeover, "_on_lost_journal", takes_over)


def deserted_nodes_unseen(patch: Patch) -> None:
    """A generation that has no ranks on a node is believed to train, as the journal says."""
    patch.setattr(MissingRanksDetector, "on_beat", lambda self, now, generation, beat: None)


PAST_DEFECTS = (
    Mutant(stopped_launch_told_again, 228, draw_setup),
    Mutant(ends_dated_at_once, 41),
    Mutant(standbys_stay_believed, 0, draw_forgetful),
    Mutant(unknown_generation_not_fenced, 243, draw_forgetful),
    Mutant(lineage_kept, 4, draw_forgetful),
    Mutant(last_call_stays_over, 110, draw_forgetful),
)
