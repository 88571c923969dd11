"""Slow jobs: how long they stay slow, and whether a detector or a person ends the slowness."""

from collections.abc import Callable
from functools import partial

from holdfast.model.detector_alarm import Alarm
from holdfast.sim.scale.failure_mixes import FailureMode
from holdfast.sim.scale.node_defects import NodeDefect
from holdfast.sim.scale.scale_state import ScaleState
from holdfast.sim.scale.simulated_people import GiveOrder, SimulatedPeople

RaiseAlarm = Callable[[Alarm, str, int], None]  # the alarm, the failure that raised it, and its generation


class SlowJobs:
    def __init__(
        self, state: ScaleState, people: SimulatedPeople, give_order: GiveOrder, raise_alarm: RaiseAlarm
    ) -> None:
        self._state = state
        self._people = people
        self._give_order = give_order
        self._raise_alarm = raise_alarm

    def slow_steps(self, fault: FailureMode, seconds: float) -> None:
        """Record in the time book that steps are slow for this many seconds from now."""
        state = self._state
        state.book.add_slow_stretch(state.now, seconds, state.prices.share_value("drag"), fault.name)

    def show_slowness(self, fault: FailureMode, node: str, defect: NodeDefect | None) -> None:
        """Slow the job down. It stays slow until a person acts, or until an earlier alarm names the slow host."""
        state = self._state
        off = "slow" in state.setup.off
        person_s = state.prices("person", "unseen") if off else state.prices("person")
        named = fault.host and defect is not None and defect.hang_lot < state.prices.share_value("slow_named")
        sign = state.signs.slow_sign(node, state.course.runs_s(state.now)) if named else None
        if off or defect is None or sign is None or sign.after_s >= person_s:
            self._leave_to_person(fault, node, defect, person_s)
            return
        self.slow_steps(fault, sign.after_s)
        state.call_later(sign.after_s, self._act_on, sign.alarm, defect, state.view.generation, person_s - sign.after_s)

    def _act_on(self, alarm: Alarm, defect: NodeDefect, generation: int, person_s: float) -> None:
        state, (node,) = self._state, alarm.suspects
        if state.defects.get(node) is defect:
            before = state.view.incidents
            self._raise_alarm(alarm, defect.fault.name, generation)
            if state.view.incidents == before:  # nobody can take its place, or its pace counts as the job's own now
                self._leave_to_person(defect.fault, node, defect, person_s)

    def _leave_to_person(self, fault: FailureMode, node: str, defect: NodeDefect | None, person_s: float) -> None:
        self.slow_steps(fault, person_s)
        call = partial(self._people.on_found, node, defect) if defect is not None else partial(self._roll_back, fault)
        self._state.call_later(person_s, call)

    def _roll_back(self, fault: FailureMode) -> None:
        self._state.tally.people += 1
        self._state.bugs.mend_fault(fault.name)
        self._give_order("rollback", fault.name, "")
