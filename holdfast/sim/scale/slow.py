"""Jobs that get slow: how long they are dragged along, and who ends it."""

from functools import partial
from typing import TYPE_CHECKING

from holdfast.model.alarm import Alarm
from holdfast.sim.scale.defects import Defect

if TYPE_CHECKING:
    from holdfast.sim.scale.mixes import Fault
    from holdfast.sim.scale.ours import Ours


class Slow:
    def __init__(self, world: "Ours") -> None:
        self.world = world

    def drags(self, fault: "Fault", seconds: float) -> None:
        """Steps are made, but slowly, for so long from now on."""
        world = self.world
        world.book.drag(world.now, seconds, world.prices.share("drag"), fault.name)

    def show(self, fault: "Fault", node: str, defect: Defect | None) -> None:
        """Until a person comes; a slow host is named, and acted on once it costs enough."""
        world = self.world
        off = "slow" in world.setup.off
        person_s = world.prices("person", "unseen") if off else world.prices("person")
        named = fault.host and defect is not None and defect.hang_lot < world.prices.share("slow_named")
        sign = world.signs.slow(node, world.course.runs_s(world.now)) if named else None
        if off or defect is None or sign is None or sign.after_s >= person_s:
            self._left(fault, node, defect, person_s)
            return
        self.drags(fault, sign.after_s)
        world.later(sign.after_s, self._act_on, sign.alarm, defect, world.decider.generation, person_s - sign.after_s)

    def _act_on(self, alarm: Alarm, defect: Defect, generation: int, person_s: float) -> None:
        world, (node,) = self.world, alarm.suspects
        if world.defects.get(node) is defect:
            before = world.decider.incidents
            world.cry(alarm, defect.fault.name, generation)
            if world.decider.incidents == before:  # nobody can take its place, or its pace counts as the job's own now
                self._left(defect.fault, node, defect, person_s)

    def _left(self, fault: "Fault", node: str, defect: Defect | None, person_s: float) -> None:
        self.drags(fault, person_s)
        staff = self.world.staff
        call = partial(staff.found, node, defect) if defect is not None else partial(self._roll_back, fault)
        self.world.later(person_s, call)

    def _roll_back(self, fault: "Fault") -> None:
        self.world.tally.people += 1
        self.world.bugs.mend(fault.name)
        self.world.order("rollback", fault.name)
