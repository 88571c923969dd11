"""Jobs that get slow: for how long, and whether a detector or a person ends it."""

from functools import partial
from typing import TYPE_CHECKING

from holdfast.model.alarm import Alarm
from holdfast.sim.scale.node_defects import NodeDefect

if TYPE_CHECKING:
    from holdfast.sim.scale.failure_mixes import FailureMode
    from holdfast.sim.scale.holdfast_policy import HoldfastPolicy


class SlowJobs:
    def __init__(self, world: "HoldfastPolicy") -> None:
        self.world = world

    def slow_steps(self, fault: "FailureMode", seconds: float) -> None:
        """Book slow steps for this long from now on."""
        world = self.world
        world.book.add_slow_stretch(world.now, seconds, world.prices.share_value("drag"), fault.name)

    def show_slowness(self, fault: "FailureMode", node: str, defect: NodeDefect | None) -> None:
        """Slow the job until a person acts, or, for a slow host that is named, until its cost justifies an alarm."""
        world = self.world
        off = "slow" in world.setup.off
        person_s = world.prices("person", "unseen") if off else world.prices("person")
        named = fault.host and defect is not None and defect.hang_lot < world.prices.share_value("slow_named")
        sign = world.signs.slow_sign(node, world.course.runs_s(world.now)) if named else None
        if off or defect is None or sign is None or sign.after_s >= person_s:
            self._leave_to_person(fault, node, defect, person_s)
            return
        self.slow_steps(fault, sign.after_s)
        world.call_later(sign.after_s, self._act_on, sign.alarm, defect, world.view.generation, person_s - sign.after_s)

    def _act_on(self, alarm: Alarm, defect: NodeDefect, generation: int, person_s: float) -> None:
        world, (node,) = self.world, alarm.suspects
        if world.defects.get(node) is defect:
            before = world.view.incidents
            world.raise_alarm(alarm, defect.fault.name, generation)
            if world.view.incidents == before:  # nobody can take its place, or its pace counts as the job's own now
                self._leave_to_person(defect.fault, node, defect, person_s)

    def _leave_to_person(self, fault: "FailureMode", node: str, defect: NodeDefect | None, person_s: float) -> None:
        self.slow_steps(fault, person_s)
        staff = self.world.staff
        call = partial(staff.on_found, node, defect) if defect is not None else partial(self._roll_back, fault)
        self.world.call_later(person_s, call)

    def _roll_back(self, fault: "FailureMode") -> None:
        self.world.tally.people += 1
        self.world.bugs.mend_fault(fault.name)
        self.world.give_order("rollback", fault.name)
