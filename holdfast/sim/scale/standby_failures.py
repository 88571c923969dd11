"""Failures of standbys while they wait."""

from collections.abc import Callable

import msgspec

from holdfast.model.decider_events import Event
from holdfast.model.detector_alarm import Alarm
from holdfast.model.journal_entry import Decision
from holdfast.sim.scale import node_defects
from holdfast.sim.scale.failure_schedule import ScheduledFailure
from holdfast.sim.scale.node_neighbours import FailurePlace
from holdfast.sim.scale.scale_state import ScaleState


class StandbyFailures:
    def __init__(self, state: ScaleState, step_decider: Callable[[Event], Decision]) -> None:
        self._state = state
        self._step_decider = step_decider

    def strike_standby(self, strike: ScheduledFailure) -> None:
        """Let a waiting standby fall silent or fail its health reading; the decider then replaces it."""
        state, fault = self._state, strike.fault
        waiting = sorted(state.view.pool.keys() & state.nodes - state.dead)
        if not waiting or (fault.shows == "health" and "health" in state.setup.off):
            return
        node = waiting[int(strike.luck * len(waiting))]
        state.tally.standbys_lost += 1
        if fault.shows == "silence":
            state.dead.add(node)
        else:
            state.defects[node] = node_defects.draw_defect(fault, state.rng)
        sign = state.signs.draw_sign(fault, FailurePlace(node=node, other=node), state.rng, None)
        state.call_later(sign.after_s, self._report_alarm, sign.alarm)

    def _report_alarm(self, alarm: Alarm) -> None:
        """Report the alarm if the node is still in the job, whether it is still a standby or has a seat by now."""
        state = self._state
        if not state.nodes.isdisjoint(alarm.suspects):
            self._step_decider(msgspec.structs.replace(alarm, at=state.now, generation=state.view.generation))
