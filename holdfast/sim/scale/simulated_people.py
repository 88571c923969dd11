"""Simulated people: they answer when asked, look for bad machines, and fix releases."""

from collections.abc import Callable

from holdfast.model.decider_events import OrderVerb
from holdfast.model.job_phase import Phase
from holdfast.sim.scale.failure_mixes import FailureMode
from holdfast.sim.scale.node_defects import NodeDefect
from holdfast.sim.scale.scale_state import ScaleState

GiveOrder = Callable[[OrderVerb, str, str], None]  # verb, the failure that it is about, and the node or ""


class SimulatedPeople:
    def __init__(self, state: ScaleState, give_order: GiveOrder) -> None:
        self._state = state
        self._give_order = give_order
        self._sought: set[str] = set()  # nodes that somebody is looking for
        self._mending: set[str] = set()  # releases' failures that somebody is at work on
        self._done_at = 0.0  # when whoever was asked knows the answer

    def begin_job(self) -> None:
        """Forget all searches and fixes of the previous job."""
        self._sought.clear()
        self._mending.clear()
        self._done_at = 0.0

    # --- a job that asks -----------------------------------------------------------------------------------------

    def ask_person(self) -> None:
        state = self._state
        state.tally.people += 1
        takes_s = self._takes_s(state.cried)
        self._done_at = state.now + takes_s
        state.call_later(takes_s, self._answer_job, state.cried)

    def _answer_job(self, name: str) -> None:
        """Act once a person knows the cause: evict the bad machines, and resume the job if it is paused."""
        state = self._state
        for node in self.mend_failure(name):
            self._give_order("evict", name, node)
        if state.view.phase is Phase.HELD:
            self._give_order("resume", name, "")

    def mend_failure(self, name: str) -> list[str]:
        """Fix the cause of the failure `name`. Return the machines whose defect causes it; they must be evicted."""
        state = self._state
        state.bugs.mend_fault(name)
        if state.away[1] is not None and state.away[1].name == name:
            state.away = (0.0, None)
        return [node for node, defect in state.defects.items() if defect.fault.name == name]

    def rest_s(self, name: str) -> float:
        """Return the seconds from now until a person knows why the job gave up."""
        if self._done_at > self._state.now:
            return self._done_at - self._state.now
        self._state.tally.people += 1
        return self._takes_s(name)

    def _takes_s(self, name: str) -> float:
        corrupts = any(fault.name == name and fault.shows == "loss" for fault in self._state.mix.fault)
        return self._state.prices("person_corruption" if corrupts else "person")

    # --- a bad machine -------------------------------------------------------------------------------------------

    def page_person(self, node: str, defect: NodeDefect) -> None:
        """After a delay, let a person search for a defective machine."""
        self._state.call_later(self._state.prices("page"), self._seek_machine, node, defect)

    def _seek_machine(self, node: str, defect: NodeDefect) -> None:
        """Start a person's search for a bad machine. If it computes wrongly, pause the job during the search."""
        state = self._state
        if node in self._sought or state.defects.get(node) is not defect:
            return
        self._sought.add(node)
        corrupts = defect.fault.shows == "loss"
        if corrupts:
            self._give_order("hold", defect.fault.name, "")
        state.call_later(self._takes_s(defect.fault.name), self.on_found, node, defect, corrupts)

    def on_found(self, node: str, defect: NodeDefect, held: bool = False) -> None:
        """Evict the bad machine that a person found, if the job still has it. Resume a job that was paused (`held`)."""
        state = self._state
        self._sought.discard(node)
        if state.defects.get(node) is defect and node not in state.dead:
            state.tally.people += 1
            self._give_order("evict", defect.fault.name, node)
        if held:
            self._give_order("resume", defect.fault.name, "")

    # --- a bad release -------------------------------------------------------------------------------------------

    def plan_mend(self, fault: FailureMode) -> None:
        """Have the authors of a failed release fix its fault once a person is available; plan each fix only once."""
        if fault.name not in self._mending:
            self._mending.add(fault.name)
            self._state.call_later(self._state.prices("person"), self._on_mended, fault)

    def _on_mended(self, fault: FailureMode) -> None:
        self._mending.discard(fault.name)
        self._state.tally.people += self._state.bugs.mend_fault(fault.name)
