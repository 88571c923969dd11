"""Failures of standbys while they wait."""

from typing import TYPE_CHECKING

import msgspec

from holdfast.model.alarm import Alarm
from holdfast.sim.scale import node_defects
from holdfast.sim.scale.node_neighbours import FailurePlace

if TYPE_CHECKING:
    from holdfast.sim.scale.failure_schedule import ScheduledFailure
    from holdfast.sim.scale.holdfast_policy import HoldfastPolicy


class StandbyFailures:
    def __init__(self, world: "HoldfastPolicy") -> None:
        self.world = world

    def strike_standby(self, strike: "ScheduledFailure") -> None:
        """Let a waiting standby fall silent or fail its health reading; the decider then replaces it."""
        world, fault = self.world, strike.fault
        waiting = sorted(world.view.pool.keys() & world.nodes - world.dead)
        if not waiting or (fault.shows == "health" and "health" in world.setup.off):
            return
        node = waiting[int(strike.luck * len(waiting))]
        world.tally.standbys_lost += 1
        if fault.shows == "silence":
            world.dead.add(node)
        else:
            world.defects[node] = node_defects.draw_defect(fault, world.rng)
        sign = world.signs.draw_sign(fault, FailurePlace(node=node, other=node), world.rng, None)
        world.call_later(sign.after_s, self._report_alarm, sign.alarm)

    def _report_alarm(self, alarm: Alarm) -> None:
        """Report the alarm if the node is still there; if it has a seat by now, the failure counts as any other."""
        world = self.world
        if not world.nodes.isdisjoint(alarm.suspects):
            world.step_decider(msgspec.structs.replace(alarm, at=world.now, generation=world.view.generation))
